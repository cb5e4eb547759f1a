# SPDX-License-Identifier: Apache-2.0
"""The options that all benchmarks have, and how they are shown."""

import argparse
import os
import sys
from pathlib import Path

from benchmarks.support import machine

PATH_OPTIONS: dict[str, list[str]] = {
    "--json": [],
    "--cache": [],
    "--data": ["--data", "FOLDER"],
    "--rivals": ["--rivals", "PYTHON"],
}
"""What results show of them: only `--data` and `--rivals` decide what is measured."""


def argument_parser(description: str, *, rounds: int, threads: int = 1) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the result here")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, to see that it runs")
    parser.add_argument("--threads", type=int, default=threads, help="cores (%(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=rounds, help="measurements of each, interleaved (%(default)s)"
    )
    return parser


def run_as_vllm_worker(threads: int) -> None:
    """Starts this program again as vLLM starts its workers: threads bound to cores of their own and
    one OpenMP runtime for torch and relay, since idle threads of a second one would spin on them.
    """
    if threads == 1 or "GOMP_CPU_AFFINITY" in os.environ:
        return
    import torch

    folder = Path(torch.__file__).parent
    runtimes = [*folder.glob("lib/libgomp*.so*"), *folder.parent.glob("torch.libs/libgomp*.so*")]
    preload = [*map(str, runtimes[:1]), *filter(None, [os.environ.get("LD_PRELOAD")])]
    cores = machine.available_cores()[:threads]
    os.environ["GOMP_CPU_AFFINITY"] = " ".join(map(str, cores))
    os.environ["LD_PRELOAD"] = ":".join(preload)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def without_paths(arguments: list[str]) -> list[str]:
    """Without what only says where files of this machine are."""
    kept, skip = [], False
    for argument in arguments:
        name = argument.partition("=")[0]
        if skip:
            skip = False
        elif name in PATH_OPTIONS:
            kept += PATH_OPTIONS[name]
            skip = argument == name
        else:
            kept.append(argument)
    return kept

# SPDX-License-Identifier: Apache-2.0
"""Runs a random workload of the key indexes and checksums under the compiler's sanitizers.

Compiles csrc/index, csrc/storage and csrc/common as the last build of the extension did (its
commands are in build/compile_commands.json), with `address,undefined` and once more with `thread`,
together with tests/native/index_workload.cpp.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("csrc/common/", "csrc/index/", "csrc/storage/")
DRIVER = "tests/native/index_workload.cpp"
# gcc's OpenMP runtime is unknown to the thread sanitizer: one thread builds, others search
BUILD_THREADS = {"address,undefined": 3, "thread": 1}
ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1",
}


def compile_commands() -> dict[str, list[str]]:
    """By source, in the order in which they are to be linked, without the parts that name files
    and how much to optimize."""
    recorded = ROOT / "build" / "compile_commands.json"
    if not recorded.exists():
        raise SystemExit(f"{recorded} is missing: build the extension first (make setup)")
    commands = {}
    for entry in json.loads(recorded.read_text()):
        command = entry["arguments"]
        end = command.index("-MMD")
        commands[entry["file"]] = [part for part in command[:end] if part != "-O3"]
    return commands


def build(sanitizers: str, jobs: int) -> Path:
    """The workload, compiled with `sanitizers`."""
    commands = compile_commands()
    sources = {DRIVER: commands["csrc/index/index_portable.cpp"]}
    sources |= {name: each for name, each in commands.items() if name.startswith(FOLDERS)}
    folder = ROOT / "build" / f"sanitize-{sanitizers.replace(',', '-')}"
    folder.mkdir(parents=True, exist_ok=True)
    flags = ["-O1", "-g", "-fno-omit-frame-pointer", f"-fsanitize={sanitizers}"]
    flags.append("-fno-sanitize-recover=all")

    def compile_one(source: str) -> str:
        target = str(folder / (source.replace("/", "_") + ".o"))
        run([*sources[source], *flags, "-c", source, "-o", target])
        return target

    with ThreadPoolExecutor(jobs) as pool:
        objects = list(pool.map(compile_one, sources))
    workload = folder / "index_workload"
    compiler = sources[DRIVER][: sources[DRIVER].index("-std=c++20")]
    run([*compiler, *objects, *flags, "-fopenmp", "-pthread", "-o", str(workload)])
    return workload


def run(command: list[str], **environment: str) -> None:
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(
            f"{shlex.join(command)}\nended with {done.returncode}\n{done.stdout}{done.stderr}"
        )
    sys.stdout.write(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sanitizers", nargs="*", default=list(BUILD_THREADS))
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--search-threads", type=int, default=3)
    arguments = parser.parse_args()
    jobs = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
    for sanitizers in arguments.sanitizers:
        workload = build(sanitizers, jobs)
        threads = [str(arguments.search_threads), str(BUILD_THREADS[sanitizers])]
        print(f"{sanitizers}: ", end="", flush=True)
        run([str(workload), str(arguments.cases), *threads], **ENVIRONMENT)


if __name__ == "__main__":
    main()

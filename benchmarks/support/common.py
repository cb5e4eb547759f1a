# SPDX-License-Identifier: Apache-2.0
"""What all benchmarks share: options, timing, goals, and the result as text and JSON."""

import argparse
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.support import machine

Row = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]

PATH_OPTIONS: dict[str, list[str]] = {"--json": [], "--cache": [], "--data": ["--data", "FOLDER"]}
"""What results show of them: only `--data` decides what is measured."""


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


@dataclass(frozen=True)
class Timing:
    """Seconds per call of one contender in every round."""

    samples_s: list[float]

    @property
    def median_s(self) -> float:
        return statistics.median(self.samples_s)

    @property
    def median_ms(self) -> float:
        return self.median_s * 1e3

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a fraction of the median."""
        if len(self.samples_s) < 3:
            return 0.0
        low, _, high = statistics.quantiles(self.samples_s, n=4, method="inclusive")
        return (high - low) / 2 / self.median_s


def ratio(slower: Timing, faster: Timing) -> float:
    """How many times faster: the median of the ratios of neighbouring measurements."""
    return statistics.median(a / b for a, b in zip(slower.samples_s, faster.samples_s, strict=True))


def interleaved(
    contenders: dict[str, Callable[[], Any]],
    rounds: int,
    min_sample_s: float = 2e-3,
    prepare: Callable[[], None] = lambda: None,
) -> dict[str, Timing]:
    """Times contenders in turn, round after round, so that all meet the same disturbances.

    A sample repeats a short call until it takes about `min_sample_s`; `prepare` is called before
    it. Every second round goes backwards.
    """
    repeats = {}
    for name, call in contenders.items():
        call()
        began_s = time.perf_counter()
        call()
        once_s = time.perf_counter() - began_s
        repeats[name] = max(1, min(1000, round(min_sample_s / max(once_s, 1e-7))))
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for index in range(rounds):
        for name in list(contenders)[:: -1 if index % 2 else 1]:
            call = contenders[name]
            prepare()
            began_s = time.perf_counter()
            for _ in range(repeats[name]):
                call()
            samples[name].append((time.perf_counter() - began_s) / repeats[name])
    return {name: Timing(values) for name, values in samples.items()}


@dataclass(frozen=True)
class Goal:
    """A number and what it was meant to be."""

    what: str
    value: float | None
    bar: float | None
    aim: float | None = None
    lower_is_better: bool = False
    unit: str = "x"

    @property
    def met(self) -> bool | None:
        if self.value is None or self.bar is None:
            return None
        return self.value <= self.bar if self.lower_is_better else self.value >= self.bar


@dataclass
class Result:
    """What one benchmark found."""

    name: str
    description: str
    settings: dict[str, Any]
    machine: dict[str, Any]
    peak: dict[str, Any]
    tables: list[dict[str, Any]] = field(default_factory=list)
    goals: list[dict[str, Any]] = field(default_factory=list)
    command: str = ""

    @classmethod
    def begin(cls, file: str, description: str, options: argparse.Namespace) -> "Result":
        """Describes and calibrates the machine."""
        path = Path(file).resolve().relative_to(ROOT).with_suffix("")
        name = path.name
        settings = {
            key: value for key, value in vars(options).items() if f"--{key}" not in PATH_OPTIONS
        }
        shown = _without_paths(sys.argv[1:])
        result = cls(
            name=name,
            description=description.strip(),
            settings=settings,
            machine=machine.describe(),
            peak=machine.measure_peak(options.threads),
            command=shlex.join(["python", "-m", ".".join(path.parts), *shown]),
        )
        print(f"# {name}: {description.splitlines()[0]}")
        print(f"# {result.machine['cpu']}, kernel {result.machine['relay_kernels'][0]}, "
              f"vLLM {result.machine['vllm']}, load {result.machine['load_before']}")  # fmt: skip
        print(f"# peak {result.peak}", flush=True)
        return result

    def add_table(self, title: str, rows: Sequence[Row], note: str = "") -> None:
        self.tables.append({"title": title, "note": note, "rows": list(rows)})
        print(f"\n{title}")
        print(format_rows(rows), flush=True)

    def add_goal(self, goal: Goal) -> None:
        self.goals.append({**asdict(goal), "met": goal.met})

    def end(self, options: argparse.Namespace) -> None:
        """Prints the goals and writes the JSON file if one is wanted. Tiny shapes have no goals."""
        if options.smoke:
            self.goals = []
        for goal in self.goals:
            verdict = {True: "met", False: "MISSED", None: "-"}[goal["met"]]
            sign = "<=" if goal["lower_is_better"] else ">="
            print(f"{verdict:6} {goal['what']}: {show(goal['value'])} "
                  f"(bar {sign} {show(goal['bar'])}, aim {show(goal['aim'])})")  # fmt: skip
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(asdict(self), indent=1, default=str) + "\n")


def show(value: Any) -> str:
    """A table cell."""
    if value is None:
        return "-"
    if isinstance(value, float):
        if value != value:
            return "nan"
        if value == 0 or 1e-3 <= abs(value) < 1e5:
            digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 20 else 2
            return f"{value:.{digits if abs(value) >= 0.1 else 4}f}"
        return f"{value:.2e}"
    return str(value)


def format_rows(rows: Sequence[Row]) -> str:
    """Aligned text, one line per row."""
    if not rows:
        return "(none)"
    columns = list(rows[0])
    cells = [columns] + [[show(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in cells
    )


def fraction(value: float, of: float | None) -> float | None:
    return None if not of else value / of


def _without_paths(arguments: list[str]) -> list[str]:
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

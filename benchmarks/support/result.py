# SPDX-License-Identifier: Apache-2.0
"""What a benchmark found, beside what it was meant to find: as text and JSON."""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.support import machine
from benchmarks.support.formatting import Row, format_rows, show
from benchmarks.support.options import PATH_OPTIONS, without_paths

ROOT = Path(__file__).resolve().parents[2]


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
        shown = without_paths(sys.argv[1:])
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

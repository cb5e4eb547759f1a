# SPDX-License-Identifier: Apache-2.0
"""What a run has found so far, as JSON and as Markdown; written anew after every part."""

import json
import math
import os
import re
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.support.formatting import Row, format_rows, markdown_table, show
from benchmarks.support.result import Goal

Json = dict[str, Any]
NOT_MEASURED = "not measured"
WRITE_EVERY_S = 5.0
"""Within a part."""


class CudaResult:
    """Collects tables, goals, findings and what was left out, part by part.

    Args:
        data: of an interrupted run that this one continues.
    """

    def __init__(
        self, *, measured: bool, json_path: Path | None, markdown_path: Path | None,
        data: Json | None = None,
    ) -> None:  # fmt: skip
        self.measured, self.json_path, self.markdown_path = measured, json_path, markdown_path
        self.data: Json = data or {"measured": measured, "began_unix_s": time.time(), "parts": {}}
        self._part: Json = {}
        self._part_began_s = self._written_s = 0.0

    @property
    def done(self) -> list[str]:
        """Parts that need not run again."""
        return [name for name, part in self.data["parts"].items() if part["status"] != "running"]

    @property
    def part_findings(self) -> list[str]:
        return self._part["findings"]

    def describe(self, **facts: Any) -> None:
        """Facts about the run: machine, rivals, settings."""
        self.data.update(facts)
        self.write()

    def begin_part(self, name: str, what: str, budget_s: float) -> None:
        self._part = {
            "status": "running", "what": what, "budget_s": budget_s, "took_s": None,
            "tables": [], "goals": [], "findings": [], "left_out": [],
        }  # fmt: skip
        self.data["parts"][name] = self._part
        self._part_began_s = time.perf_counter()
        print(f"\n=== {name}: {what} (at most {budget_s:.0f} s)", flush=True)
        self.write()

    def end_part(self, status: str, error: str | None = None) -> None:
        """`status` is "done", "failed" or "left out"."""
        took_s = round(time.perf_counter() - self._part_began_s, 2)
        self._part.update(status=status, took_s=took_s)
        if error:
            self._part["error"] = error
        print(f"{status} after {took_s} s{': ' + error if error else ''}", flush=True)
        self.write()

    def add_table(self, title: str, rows: Sequence[Row], note: str = "") -> None:
        rows = [self._shown(row) for row in rows]
        self._part["tables"].append({"title": title, "note": note, "rows": rows})
        print(f"\n{title}")
        print(format_rows(rows), flush=True)

    def add_goal(self, goal: Goal) -> None:
        """A goal without a value is not missed, and tiny shapes have no goals."""
        met = goal.met if self.measured and not math.isnan(goal.value or 0.0) else None
        self._part["goals"].append(self._shown({**asdict(goal), "met": met}))

    def add_finding(self, text: str) -> None:
        self._part["findings"].append(text)
        print(f"- {text}", flush=True)

    def leave_out(self, text: str) -> None:
        """Says what was not done, and why."""
        if text not in self._part["left_out"]:
            self._part["left_out"].append(text)
            print(f"- left out: {text}", flush=True)

    def doing(self, what: str) -> None:
        """Notes what runs now, for the reader of a run that was cut short there."""
        self._part["doing"] = what
        print(f"  {what}", flush=True)
        if time.monotonic() - self._written_s > WRITE_EVERY_S:
            self.write()

    def write(self) -> None:
        """Both files, whole at any time."""
        self._written_s = time.monotonic()
        if self.json_path:
            _replace(self.json_path, json.dumps(self.data, indent=1, default=str) + "\n")
        if self.markdown_path:
            _replace(self.markdown_path, to_markdown(self.data))

    def print_summary(self) -> None:
        """What happened, then the goals; without the tables."""
        for name, part in self.data["parts"].items():
            print(
                f"{name}: {part['status']} after {show(part['took_s'])} s {part.get('error', '')}"
            )
            for text in part["findings"] + [f"left out: {each}" for each in part["left_out"]]:
                print(f"  {text[:300]}")
        for part in self.data["parts"].values():
            for goal in part["goals"]:
                print(f"{_verdict(goal):6} {goal['what']}: {show(goal['value'])} {_bar(goal)}")

    def _shown(self, row: Row) -> Row:
        """NaN is no JSON: it stands for what could not be computed or, without a GPU, measured."""
        missing = None if self.measured else NOT_MEASURED
        return {
            key: missing if isinstance(value, float) and math.isnan(value) else value
            for key, value in row.items()
        }


def without_folders(text: str) -> str:
    """Files by their names alone: where they are says nothing about the kernels."""
    return re.sub(r"(?<![\w.])(/[\w.+-]+)+/(?=[\w.+-])", "", text)


def to_markdown(data: Json) -> str:
    parts = data["parts"]
    lines = ["# The Triton kernels on a GPU\n"]
    if not data["measured"]:
        lines.append(
            "**Run under Triton's interpreter on tiny shapes: it only shows that everything runs; "
            "nothing was timed.**\n"
        )
    if wrong := [text for part in parts.values() for text in part["findings"] if "WRONG" in text]:
        lines.append("**Some results are wrong; the times below say nothing until they are not:**")
        lines += ["", *(f"- {text}" for text in wrong), ""]
    if machine := data.get("machine"):
        lines += [f"- {key}: {_text(value)}" for key, value in machine.items()]
    for name, state in data.get("rivals", {}).items():
        lines.append(f"- rival, {name}: {state}")
    if ceilings := data.get("ceilings"):
        lines += [f"- {key}: {show(value)}" for key, value in ceilings.items()]
    if compiled := data.get("compiled"):
        lines.append(f"- compiled: {_text(compiled)}")
    lines.append("")
    if goals := [goal for part in parts.values() for goal in part["goals"]]:
        rows = [
            {
                "what": goal["what"],
                "measured": goal["value"],
                "bar": _bar(goal),
                "aim": goal["aim"],
                "met": _verdict(goal),
            }
            for goal in goals
        ]
        lines += ["## Goals\n", markdown_table(rows)]
    for name, part in parts.items():
        lines += _part_lines(name, part)
    return "\n".join(lines).rstrip() + "\n"


def _part_lines(name: str, part: Json) -> list[str]:
    took = "" if part["took_s"] is None else f", {part['took_s']:.1f} s of {part['budget_s']:.0f} s"
    lines = [f"## {name}: {part['what']}\n", f"{part['status'].capitalize()}{took}.\n"]
    if part["status"] in ("failed", "running"):
        lines.append(f"Last at: {part.get('doing', '-')}. {part.get('error', '')}\n")
    lines += [f"- {text}" for text in part["findings"]]
    lines += [f"- left out: {text}" for text in part["left_out"]]
    lines.append("")
    for table in part["tables"]:
        lines += [f"**{table['title']}**\n", markdown_table(table["rows"])]
        if table["note"]:
            lines.append(table["note"] + "\n")
    return lines


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {show(item)}" for key, item in value.items())
    return show(value)


def _bar(goal: Json) -> str:
    sign = "<=" if goal["lower_is_better"] else ">="
    return f"{sign} {show(goal['bar'])}{' ' + goal['unit'] if goal['unit'] != 'x' else ''}"


def _verdict(goal: Json) -> str:
    return {True: "met", False: "MISSED", None: "-"}[goal["met"]]


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text)
    draft.replace(path)

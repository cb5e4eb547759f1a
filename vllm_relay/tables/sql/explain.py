# SPDX-License-Identifier: Apache-2.0
"""What a query with llm() would take: its calls are estimated, none is asked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_relay.tables.jobs.estimates.estimate import Estimate
from vllm_relay.tables.outputs import AnswerValue, Output
from vllm_relay.tables.structs.types import ColumnType, Enum, ListOf, StructOf


@dataclass(frozen=True)
class CallEstimate:
    """
    Attributes:
        call: its text.
        estimate: of its job.
        is_bound: predicates that ask the model may leave out rows of it.
    """

    call: str
    estimate: Estimate
    is_bound: bool


@dataclass(frozen=True)
class Explanation:
    """
    Attributes:
        calls: in the order in which they would be asked.
        before: the query as it was given.
        steps: what is done instead, a line each.
    """

    calls: list[CallEstimate]
    before: str
    steps: list[str]

    @property
    def num_rows(self) -> int:
        return sum(call.estimate.num_rows for call in self.calls)

    @property
    def num_tokens(self) -> int:
        """Of the prompts that would run, and of their answers."""
        return sum(call.estimate.prompt_tokens + call.estimate.output_tokens for call in self.calls)

    @property
    def seconds(self) -> float | None:
        """Of all calls; None if the speed of the engine is not known."""
        known = [call.estimate.seconds for call in self.calls]
        return sum(second for second in known if second is not None) if None not in known else None

    def __str__(self) -> str:
        lines: list[str] = []
        for number, call in enumerate(self.calls, 1):
            lines += [f"call {number}: {call.call}", *_estimate_lines(call)]
        bound = "at most " if any(call.is_bound for call in self.calls) else ""
        seconds = "" if self.seconds is None else f", about {self.seconds:.1f} s"
        lines.append(
            f"total: {bound}{self.num_rows:,} rows, {bound}{self.num_tokens:,} tokens{seconds}"
        )
        lines += ["", "as given:", _indented(self.before), "", "as run:"]
        lines += [_indented(step) for step in self.steps]
        return "\n".join(lines)


def _estimate_lines(call: CallEstimate) -> list[str]:
    found = call.estimate
    bound = "at most " if call.is_bound else ""
    exact = "" if found.tokens_are_exact else "about "
    cached = "not known" if found.cached_tokens is None else f"{found.cached_tokens:,}"
    seconds = "not known" if found.seconds is None else f"about {found.seconds:.1f}"
    return [
        f"  rows:           {bound}{found.num_rows:,}",
        f"  prompts:        {bound}{found.num_prompts:,} different, {found.num_known:,} known",
        f"  prompt tokens:  {bound}{exact}{found.prompt_tokens:,}, of which cached: {cached}",
        f"  output tokens:  about {found.output_tokens:,}",
        f"  order:          {found.order}",
        f"  seconds:        {seconds}",
        *([f"  warning:        {found.warning}"] if found.warning else []),
    ]


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def stand_in(output: Output, key: Sequence[str | None]) -> AnswerValue:
    """Some answer, another one for other fields where that is possible."""
    digest = hashlib.blake2b(repr(key).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    number = int.from_bytes(digest, "big")
    if output.choices:
        return output.choices[number % len(output.choices)]
    if output.struct is not None:
        return json.dumps(_part_of_struct(output.struct.type, number))
    values: dict[str, AnswerValue] = {
        "text": str(number),
        "int": number % 10,
        "float": float(number % 10),
        "bool": number % 2 == 0,
        "json": json.dumps({"number": number}),
    }
    return values[output.type]


def _part_of_struct(type: ColumnType, number: int) -> Any:
    if isinstance(type, StructOf):
        return {each.name: _part_of_struct(each.type, number) for each in type.properties}
    if isinstance(type, ListOf):
        return [_part_of_struct(type.element, number)]
    if isinstance(type, Enum):
        return type.texts[0]
    values = {
        "VARCHAR": str(number),
        "BOOLEAN": number % 2 == 0,
        "DATE": f"2000-01-{1 + number % 10:02}",
    }
    return values.get(type.sql, number % 10)

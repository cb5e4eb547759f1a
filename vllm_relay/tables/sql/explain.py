# SPDX-License-Identifier: Apache-2.0
"""What a statement would take: its calls are estimated, none is asked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_relay.tables.jobs.answers import Answer
from vllm_relay.tables.jobs.report import Estimate
from vllm_relay.tables.outputs import AnswerValue, Output
from vllm_relay.tables.sql.database import TemporaryTables
from vllm_relay.tables.sql.jobs import Counts, JobRunner
from vllm_relay.tables.sql.replay.answers import Answers
from vllm_relay.tables.sql.replay.limits import limited
from vllm_relay.tables.sql.replay.passes import Passes
from vllm_relay.tables.sql.replay.replayed import Replayed
from vllm_relay.tables.sql.replay.samples import MIN_SAMPLED_ROWS, SAMPLE_ROWS
from vllm_relay.tables.sql.replay.statement import Kind, query_of
from vllm_relay.tables.sql.rewrites.filters import add_anchors
from vllm_relay.tables.sql.rewrites.volatile import settle
from vllm_relay.tables.sql.text.answer_columns import with_ctes
from vllm_relay.tables.sql.text.call_sites import Call, Site
from vllm_relay.tables.sql.text.conditions import conjuncts
from vllm_relay.tables.sql.text.edited import Edited
from vllm_relay.tables.sql.text.structure import Range
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


_ALL_ROWS = f"LIMIT {2**62} "
"""Instead of a limit, which DuckDB moves no condition through."""


def estimates(
    tables: TemporaryTables,
    edited: Edited,
    answers: Answers,
    runner: JobRunner,
    kind: Kind,
) -> Explanation:
    """Conditions that ask leave out no rows, so that numbers of rows are upper bounds."""
    shown = edited.shown()
    settle(tables, edited)
    add_anchors(edited)
    look_at_choices(edited)
    for query in edited.structure.all_queries:
        for select in query.selects:
            found = limited(edited, select)
            is_unclear = found is None and bool(edited.calls_in(select.range))
            # rows that pass conditions only here must not fill a limit
            if is_unclear or _is_decided(edited, select.range):
                text = _ALL_ROWS
                for part in ("limit", "offset"):
                    if part in select.clauses:
                        edited.replace_clause(select, part, text)
                        text = ""

    def ask(site: Site, counts: Counts) -> list[Answer]:
        return [Answer(stand_in(site.question.output, key)) for key in counts]

    whole = query_of(edited) if kind == "of query" else None
    answers.counts_looks = True
    passes = Passes(Replayed(tables, edited, answers, ask), None)
    reading = {tokens for tokens in edited.conditions if edited.reads_answers(tokens)}
    edited.lets_all_through = {*edited.conditions} - reading
    edited.lets_none_through = {*reading}
    # what a condition reads is known, and counted once, before rows pass it
    for tokens in (None, *sorted(reading, key=lambda tokens: tokens[1])):
        if tokens is not None:
            edited.lets_none_through.remove(tokens)
            edited.lets_all_through.add(tokens)
        if kind == "change":
            passes.run(edited.text)
        else:
            passes.table_of(lambda: edited.text(None if whole is None else whole.range))
    answers.counts_looks = False
    calls = [_estimated(edited, runner, site, answers.asked[site.number]) for site in edited.sites]
    steps = [f"stage: {shown.strip()}"]
    for condition in edited.conditions.values():
        asking = [part for part in conjuncts(condition) if part.asks]
        if len(asking) > 1:
            steps.append(
                f"the {len(asking)} predicates that ask go in the order that a sample of "
                f"{SAMPLE_ROWS} rows suggests, if there are {MIN_SAMPLED_ROWS} rows or more"
            )
    if reading:
        steps.append("a condition reads answers: how many rows are asked depends on them")
    return Explanation(
        [call for call in calls if call is not None], edited.structure.text.strip(), steps
    )


def _estimated(
    edited: Edited, runner: JobRunner, site: Site, counts: Counts
) -> CallEstimate | None:
    if not counts:
        return None
    places = [call for call in edited.calls if call.site.number == site.number]
    earlier = [call for call in edited.calls if call.site.number < site.number]
    reads = any(
        call.range[0] < other.range[0] < call.range[1] for call in places for other in edited.calls
    )
    is_bound = any(_is_in(edited, call.range[0]) for call in earlier) or (
        len(edited.sites) > 1 and any(map(edited.reads_answers, edited.conditions))
    )
    estimate = runner.estimate(site, counts)
    if reads or _reads_answers(edited, places, earlier):
        estimate = replace(estimate, tokens_are_exact=False)
    return CallEstimate(site.text, estimate, is_bound)


def _is_in(edited: Edited, number: int) -> bool:
    return any(begin <= number < end for begin, end in edited.conditions)


def _is_decided(edited: Edited, tokens: Range) -> bool:
    """Whether answers decide about rows of a query, or of those of WITH that it names."""
    return any(
        begin <= condition[0] < end
        for begin, end in with_ctes(edited, tokens)
        for condition in edited.conditions
    )


def _reads_answers(edited: Edited, places: Sequence[Call], earlier: Sequence[Call]) -> bool:
    """Whether the rows hold answers: a query with a call is read by the SELECT of the call."""
    return any(
        call.select is not None
        and "from" in call.select.clauses
        and _has_answers(edited, call.select.clauses["from"], earlier)
        for call in places
    )


def _has_answers(edited: Edited, source: Range, calls: Sequence[Call]) -> bool:
    """Whether a FROM has one of some calls, or names a query of WITH that has one."""
    return any(
        begin <= call.range[0] < end for begin, end in with_ctes(edited, source) for call in calls
    )


def look_at_choices(edited: Edited) -> None:
    """Have an estimate count all calls among which answers choose, as these are not known."""
    structure = edited.structure
    end = 0
    for tokens, decides in _choices(edited):
        calls = edited.calls_of(tokens)
        deciding = [call for call in calls if any(a <= call.range[0] < b for a, b in decides)]
        words = {structure.word(number).lower() for number in range(*tokens)}
        is_of_rows = not words & {*edited.function_names.aggregates, "over"}
        if tokens[0] >= end and deciding and len(calls) > 1 and is_of_rows:
            edited.look_at(tokens)
            end = tokens[1]


def _choices(edited: Edited) -> Iterator[tuple[Range, list[Range]]]:
    """Where they are, and what of them decides."""
    structure = edited.structure
    for number in range(len(structure.tokens)):
        word = structure.word(number)
        if word == "CASE":
            yield from _case(edited, number)
        elif word in ("IF", "IFNULL", "COALESCE") and number + 1 in structure.match:
            closing = structure.match[number + 1]
            arguments = structure.split((number + 2, closing))
            decides = arguments[:1] if word == "IF" else arguments[:-1]
            yield (number, closing + 1), decides


def _case(edited: Edited, begin: int) -> Iterator[tuple[Range, list[Range]]]:
    structure = edited.structure
    decides: list[Range] = []
    depth, since = 0, begin
    for number in range(begin, len(structure.tokens)):
        word = structure.word(number)
        depth += (word == "CASE") - (word == "END")
        if depth == 0:
            yield (begin, number + 1), decides
            return
        if depth == 1 and word in ("WHEN", "THEN", "ELSE"):
            if structure.word(since) in ("CASE", "WHEN"):
                decides.append((since, number))
            since = number

# SPDX-License-Identifier: Apache-2.0
"""What a statement would take: its calls are estimated, none is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import duckdb

from vllm_relay.tables.jobs.answers import Answer
from vllm_relay.tables.sql.explain import CallEstimate, Explanation, stand_in
from vllm_relay.tables.sql.jobs import Counts, Runner
from vllm_relay.tables.sql.replay.aggregates import aggregate_names
from vllm_relay.tables.sql.replay.answers import Answers
from vllm_relay.tables.sql.replay.limits import limited
from vllm_relay.tables.sql.replay.passes import Passes
from vllm_relay.tables.sql.replay.samples import MIN_SAMPLED_ROWS, SAMPLE_ROWS
from vllm_relay.tables.sql.replay.statement import Kind, query_of
from vllm_relay.tables.sql.rewrites.anchors import add_anchors
from vllm_relay.tables.sql.rewrites.choices import look_at_choices
from vllm_relay.tables.sql.rewrites.volatile import settle
from vllm_relay.tables.sql.temporary_tables import TemporaryTables
from vllm_relay.tables.sql.text.call_sites import Call, Site
from vllm_relay.tables.sql.text.conditions import conjuncts
from vllm_relay.tables.sql.text.edited import Edited
from vllm_relay.tables.sql.text.structure import Range

_ALL_ROWS = f"LIMIT {2**62} "
"""Instead of a limit, which DuckDB moves no condition through."""
_CONDITIONS = {"where", "having", "qualify"}


def estimates(
    connection: duckdb.DuckDBPyConnection,
    tables: TemporaryTables,
    edited: Edited,
    answers: Answers,
    runner: Runner,
    kind: Kind,
) -> Explanation:
    """Conditions that ask leave out no rows, so that numbers of rows are upper bounds."""
    shown = edited.shown()
    settle(connection, tables, edited)
    add_anchors(connection, edited)
    for tokens in edited.conditions:
        edited.lets_all_through.add(tokens)
    aggregates = aggregate_names(connection)
    look_at_choices(edited, aggregates)
    for query in edited.structure.all_queries:
        for select in query.selects:
            found = limited(edited, aggregates, select)
            if found is None or found.where is not None:
                text = _ALL_ROWS
                for part in ("limit", "offset"):
                    if part in select.clauses and edited.calls_in(select.range):
                        edited.replace_clause(select, part, text)
                        text = ""

    def ask(site: Site, counts: Counts) -> list[Answer]:
        return [Answer(stand_in(site.question.output, key)) for key in counts]

    whole = query_of(edited) if kind == "of query" else None
    answers.counts_looks = True
    passes = Passes(connection, tables, edited, answers, ask, None)
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
    if any(
        "from" in select.clauses
        and _CONDITIONS & select.clauses.keys()
        and _has_answers(edited, select.clauses["from"], edited.calls)
        for query in edited.structure.all_queries
        for select in query.selects
    ):
        steps.append("a condition reads answers: how many rows are asked depends on them")
    return Explanation(
        [call for call in calls if call is not None], edited.structure.text.strip(), steps
    )


def _estimated(edited: Edited, runner: Runner, site: Site, counts: Counts) -> CallEstimate | None:
    if not counts:
        return None
    places = [call for call in edited.calls if call.site.number == site.number]
    earlier = [call for call in edited.calls if call.site.number < site.number]
    reads = any(
        call.range[0] < other.range[0] < call.range[1] for call in places for other in edited.calls
    )
    is_bound = any(_is_in(edited, call.range[0]) for call in earlier)
    estimate = runner.estimate(site, counts)
    if reads or _reads_answers(edited, places, earlier):
        estimate = replace(estimate, tokens_are_exact=False)
    return CallEstimate(site.text, estimate, is_bound)


def _is_in(edited: Edited, number: int) -> bool:
    return any(begin <= number < end for begin, end in edited.conditions)


def _reads_answers(edited: Edited, places: Sequence[Call], earlier: Sequence[Call]) -> bool:
    """Whether the rows hold answers: a query with a call is read by the SELECT of the call."""
    return any(
        call.select is not None
        and "from" in call.select.clauses
        and _has_answers(edited, call.select.clauses["from"], earlier)
        for call in places
    )


def _has_answers(edited: Edited, source: Range, calls: Sequence[Call]) -> bool:
    """Whether a FROM has one of some calls, or names a query of WITH that has a call."""
    names = {name.lower() for q in edited.structure.all_queries for name, cte in q.ctes
             if edited.calls_in(cte.range)}  # fmt: skip
    tokens = edited.structure.tokens
    return any(source[0] <= call.range[0] < source[1] for call in calls) or any(
        tokens[number].text.lower() in names for number in range(*source)
    )

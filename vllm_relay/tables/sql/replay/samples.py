# SPDX-License-Identifier: Apache-2.0
"""The order of conditions that ask, by a sample of their rows."""

from __future__ import annotations

from collections.abc import Callable

from vllm_relay.tables.sql.database import TemporaryTables
from vllm_relay.tables.sql.jobs import Counts
from vllm_relay.tables.sql.replay.replayed import Replayed
from vllm_relay.tables.sql.text.call_sites import Site
from vllm_relay.tables.sql.text.conditions import Condition, conjuncts
from vllm_relay.tables.sql.text.edited import Edited
from vllm_relay.tables.sql.text.structure import Select

# rows on which the selectivity of a condition is seen before all are asked about
SAMPLE_ROWS = 32
# with fewer, the sample would be much of the work
MIN_SAMPLED_ROWS = 4 * SAMPLE_ROWS

Cost = Callable[[Site, Counts], float]


def order_conditions(replayed: Replayed, cost_per_prompt: Cost, select: Select) -> int:
    """Put those first that leave out most rows for their tokens.

    With independent conditions this order asks for the fewest tokens.

    Returns:
        The rows of the sample.
    """
    tables, edited, answers = replayed.tables, replayed.edited, replayed.answers
    where = select.clauses["where"]
    condition = edited.conditions[where]
    parts = conjuncts(condition)
    asking = [part for part in parts if part.asks]
    calls = {id(part): edited.calls_of(part.range) for part in asking}
    every = [call for own in calls.values() for call in own]
    nested = any(
        call.range[0] < other.range[0] < call.range[1] for call in every for other in every
    )
    if len(asking) < 2 or nested or any(part.has_query for part in asking):
        return 0
    free = " AND ".join(f"({edited.text(p.range)})" for p in parts if not p.asks) or "true"
    base = f"FROM {edited.text(select.clauses['from'])} WHERE {free}"
    if tables.value(_whole(edited, select, f"SELECT count(*) {base}")) < MIN_SAMPLED_ROWS:
        return 0
    keys = ", ".join(f"{edited.key(call)} AS k{i}" for i, call in enumerate(every))
    table = tables.create(
        _whole(edited, select, f"SELECT row_number() OVER () AS r, {keys} {base}")
    )
    # with a limit, the first rows are asked about in any case
    order = "r" if "limit" in select.clauses else "hash(r)"
    rows = tables.connection.execute(
        f"SELECT * EXCLUDE (r) FROM {table} ORDER BY {order} LIMIT {SAMPLE_ROWS}"
    ).fetchall()
    tokens: dict[int, float] = {}
    ranks: dict[int, float] = {}
    for part in asking:
        tokens[id(part)] = 0.0
        for call in calls[id(part)]:
            index = every.index(call)
            given: Counts = dict.fromkeys((tuple(row[index]) for row in rows), 1)
            site = call.site.number
            per_prompt = cost_per_prompt(call.site, given)
            new = {key: 1 for key in given if not answers.is_known(site, key)}
            answers.ask(site, new, replayed.ask)
            num_prompts = tables.value(f"SELECT count(DISTINCT k{index}) FROM {table}")
            tokens[id(part)] += per_prompt * num_prompts
        passed, seen = _passed(tables, edited, select, part, base)
        ranks[id(part)] = (1 - passed / max(seen, 1)) / max(tokens[id(part)], 1e-9)
    tables.drop(table)
    ordered = sorted(asking, key=lambda part: ranks[id(part)], reverse=True)
    condition.parts = [*[part for part in parts if not part.asks], *ordered]
    return len(rows)


def _passed(
    tables: TemporaryTables, edited: Edited, select: Select, part: Condition, base: str
) -> tuple[int, int]:
    known = f"({edited.missing_of(part)}) IS NULL"
    text = (
        f"SELECT count(*) FILTER (WHERE CASE WHEN {known} THEN {edited.text(part.range)} END), "
        f"count(*) FILTER (WHERE {known}) {base}"
    )
    passed, seen = tables.connection.execute(_whole(edited, select, text)).fetchall()[0]
    return int(passed), int(seen)


def _whole(edited: Edited, select: Select, text: str) -> str:
    return edited.context(select.query, text)

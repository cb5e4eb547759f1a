# SPDX-License-Identifier: Apache-2.0
"""One answer for each group of a data frame's rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from vllm_relay.tables.caller_tables import ANSWER_NAME, arrow_columns, caller_table
from vllm_relay.tables.dataframes import fields_of, group_rows, json_texts, map_result, names_of
from vllm_relay.tables.jobs.answers import Answer, answer_table
from vllm_relay.tables.jobs.options import JobOptions
from vllm_relay.tables.map_result import MapResult, answer_type
from vllm_relay.tables.question import Question, RequestOptions, placeholders_of
from vllm_relay.tables.semantic.record_lists import RECORDS, record_question, records_of_table
from vllm_relay.tables.semantic.session import Session
from vllm_relay.tables.semantic.tree import answer_groups


@dataclass(frozen=True, repr=False)
class AggregateResult(MapResult):
    """A `MapResult` of groups: its places are theirs, in the order in which they first come.

    Attributes:
        table: the columns of `by` and the column "answer", a row for each group, in the kind of the
            table that was given.
    """

    table: Any


def llm_agg(
    table: Any,
    prompt: str,
    fields: Sequence[str] | None = None,
    *,
    engine: Any,
    by: Sequence[str] = (),
    output: Any = None,
    choices: Sequence[str] | None = None,
    max_tokens: int | None = None,
    temperature: float = 0.0,
    seed: int | None = None,
    any_order: bool = False,
    pack_tokens: int | None = None,
    request: RequestOptions | None = None,
    options: JobOptions | None = None,
) -> AggregateResult:
    """Ask one question of each group of rows.

    A prompt holds the records of a group as a list, in the table's order. A group with more records
    than the context has room for is asked about in parts, and the same question is asked of the
    answers to these, level by level. The prompts of a level are one job, so that equal ones are
    asked once.

    Args:
        table: a pandas or Polars DataFrame or an Arrow table.
        prompt: the question; ``{name}`` refers to the column of that name.
        fields: the columns of a record. None means those that the prompt refers to, or all that are
            not among `by`. Records whose fields are all missing are left out.
        engine: see `open_engine`. What is opened here is closed here.
        by: columns whose values make a group, missing ones too; none makes one group of all rows.
            Values are equal where DuckDB's ``GROUP BY`` has them so.
        output, choices, max_tokens, temperature, seed: of all answers, partial ones too, see
            `llm_map`.
        any_order: whether records may stand in any order, so that lists that share some begin
            alike.
        pack_tokens: of the records of a prompt at most, but for those of one record or two partial
            answers; None takes what the context has room for.
        request: what else the model is told.
        options: of the jobs.

    Raises:
        TypeError, ValueError, CheckpointError, EngineError: as `llm_map` does.
        MapBudgetError: there are not enough tokens for all prompts. Its `result` has the answers of
            the groups that are done; the others have an error.
    """
    rows = caller_table(table)
    types = answer_type(output, choices)
    keys = names_of("by", by) or ()
    if len(set(keys)) < len(keys):
        raise ValueError(f"by={list(keys)} given, expected each name once")
    if ANSWER_NAME in keys:
        raise ValueError(f"by={list(keys)} given, but {ANSWER_NAME!r} names the answers: rename it")
    given = names_of("fields", fields)
    if given is None and not placeholders_of(prompt):
        given = tuple(name for name in fields_of(prompt, rows, None) if name not in keys)
    names = fields_of(prompt, rows, given)
    question = record_question(
        prompt,
        names,
        types.output,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        set_fields=(RECORDS,) * any_order,
        request=request or RequestOptions(),
    )
    texts = json_texts(names, arrow_columns(rows, names))
    numbers, firsts = np.zeros(rows.num_rows, np.int64), []
    if keys:
        same = group_rows(keys, arrow_columns(rows, keys))
        numbers, firsts = same.number_of_row, same.first_rows.tolist()
    num_groups = len(firsts) if keys else 1
    groups: list[list[str]] = [[] for _ in range(num_groups)]
    for number, record in zip(numbers.tolist(), records_of_table(texts), strict=True):
        if record is not None:
            groups[number].append(record)
    with Session(options) as session:
        opened = session.open(engine)

        def ask(question: Question, lists: list[str]) -> list[Answer]:
            return session.ask(pa.table({RECORDS: pa.array(lists, pa.string())}), question, opened)

        answers = answer_groups(groups, question, opened, session.options, ask, pack_tokens)
    made = answer_table(answers, types.output)

    def table_of(values: pa.ChunkedArray) -> Any:
        return rows.groups(firsts, keys, values)

    found = map_result(lambda each: table_of(each)[ANSWER_NAME], made, types, session.report())
    result = AggregateResult(**vars(found), table=table_of(found.arrow_values))
    session.check_budget(result)
    return result

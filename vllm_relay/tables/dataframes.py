# SPDX-License-Identifier: Apache-2.0
"""A question to every row of a data frame."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal, get_args

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vllm_relay.tables.caller_tables import CallerTable, arrow_columns, caller_table
from vllm_relay.tables.engines.lazy import StoppableEngine, engine_of, in_thread
from vllm_relay.tables.images import ImageStore, image_fields
from vllm_relay.tables.jobs.arrow_texts import is_text
from vllm_relay.tables.jobs.asking import ask
from vllm_relay.tables.jobs.options import DEFAULT_BUCKET_ROWS, JobOptions, TokenBudgetError
from vllm_relay.tables.jobs.prompts.format import PromptTemplate
from vllm_relay.tables.jobs.report import JobReport
from vllm_relay.tables.map_result import (
    AnswerType,
    MapBudgetError,
    MapResult,
    RowsFailedError,
    answer_type,
)
from vllm_relay.tables.ordering.duplicates import DistinctRows, distinct_rows
from vllm_relay.tables.ordering.order import OrderChoice
from vllm_relay.tables.question import Question, RequestOptions, placeholders_of
from vllm_relay.tables.semantic.near_duplicates import NearDuplicates
from vllm_relay.tables.texts import json_text

OnError = Literal["null", "raise"]


def llm_map(
    table: Any,
    prompt: str,
    fields: Sequence[str] | None = None,
    *,
    engine: Any,
    replicas: int | None = None,
    output: Any = None,
    choices: Sequence[str] | None = None,
    order: OrderChoice = "auto",
    max_tokens: int | None = None,
    temperature: float = 0.0,
    seed: int | None = None,
    reorder: Sequence[str] = (),
    rules: Sequence[str] = (),
    retry_errors: bool = True,
    checkpoint: str | PathLike[str] | None = None,
    max_total_tokens: int | None = None,
    show_progress: bool | None = None,
    on_error: OnError = "null",
    template: PromptTemplate | None = None,
    bucket_rows: int = DEFAULT_BUCKET_ROWS,
    near_duplicates: float | NearDuplicates | None = None,
    system_prompt: str = "",
    sampling: Mapping[str, Any] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    extra_body: Mapping[str, Any] | None = None,
    images: Mapping[str, str] | Sequence[str] | None = None,
    image_folder: str | PathLike[str] | None = None,
    otlp_traces_endpoint: str | None = None,
) -> MapResult:
    """Ask a question of every row; rows whose fields are equal are asked once.

    In pandas NaN is a missing value; elsewhere it is a number, equal to itself.

    Args:
        table: a pandas or Polars DataFrame or an Arrow table.
        prompt: the question; ``{name}`` refers to the column of that name.
        fields: the columns that the prompt holds. None means those that the prompt refers to, or
            all columns if it refers to none.
        engine: see `open_engine`. What is opened here is closed here: open a model first if it is
            to answer more than one question.
        replicas: of a model that is opened here, see `open_engine`.
        output: what answers are: "text", "int", "float", "bool" or "json"; str, int, float or bool;
            a type of DuckDB of structs or lists, such as ``STRUCT(title VARCHAR, year INTEGER)``; a
            pydantic model or a JSON schema, which determine such a type; or an `Output`. Answers
            that do not fit a type, a schema or a model are errors.
        choices: the only texts that are allowed.
        order: of rows and fields in the prompts, see `JobOptions`; values are in the table's order.
        max_tokens: of an answer; None chooses by the type of the answers and the model's context.
        temperature: 0 answers greedily.
        seed: of a temperature above 0.
        reorder: those of the fields whose value is a list, and whose elements may be put in any
            order.
        rules, retry_errors, checkpoint, max_total_tokens, show_progress, template, bucket_rows,
            otlp_traces_endpoint: see `JobOptions`.
        near_duplicates: the similarity from which on rows share one answer, or `NearDuplicates`;
            None holds only equal rows for equal.
        on_error: what becomes of a row without an answer: a missing value, or an exception when all
            rows are done.
        system_prompt, sampling, chat_template_kwargs, extra_body: see `RequestOptions`.
        images: those of the fields that are images, with what their values are: "bytes" of files,
            which is meant by a list of names, a "path" below `image_folder`, or a "url".
        image_folder: below which paths may lead, links followed.

    Raises:
        TypeError: the table, the engine or the output is none of the above.
        ValueError: a field is no column of the table or cannot be shown, or another argument does
            not fit. As with a TypeError, nothing was asked yet.
        CheckpointError: the checkpoint cannot be used.
        MapBudgetError: there are not enough tokens for all prompts. Its `result` has the answers
            that came; the other rows have an error.
        EngineError: the engine is gone.
        RowsFailedError: rows have no answer, and ``on_error="raise"`` is given.
    """
    if on_error not in get_args(OnError):
        raise ValueError(f"on_error={on_error!r} given, expected one of {list(get_args(OnError))}")
    rows = caller_table(table)
    types = answer_type(output, choices)
    store = ImageStore(None if image_folder is None else Path(image_folder))
    question = Question(
        prompt,
        fields_of(prompt, rows, names_of("fields", fields)),
        types.output,
        max_tokens,
        temperature,
        seed,
        names_of("reorder", reorder) or (),
        RequestOptions(system_prompt, sampling, chat_template_kwargs, extra_body),
        image_fields(images, store),
    )
    options = JobOptions(
        order,
        names_of("rules", rules) or (),
        None if checkpoint is None else Path(checkpoint),
        max_total_tokens,
        show_progress,
        template or PromptTemplate(),
        bucket_rows,
        retry_errors=retry_errors,
        otlp_traces_endpoint=otlp_traces_endpoint,
    )
    report = JobReport()
    spent: TokenBudgetError | None = None
    num_near = 0
    with ExitStack() as cleanup:
        cleanup.callback(store.close)
        columns = arrow_columns(rows, question.fields, question.images)
        _check_lists(question, columns)
        texts = json_texts(question.fields, columns)
        if near_duplicates is not None:
            if not isinstance(near_duplicates, NearDuplicates):
                near_duplicates = NearDuplicates(near_duplicates)
            names = _text_names(question, columns)
            shared = texts.take(near_duplicates.representatives(texts, names))
            num_near = sum(row != own for row, own in zip(_rows(texts), _rows(shared), strict=True))
            texts = shared
        opened = engine_of(engine, cleanup, replicas)
        try:
            answers = ask(texts, question, opened, options, report)
        except TokenBudgetError as error:
            answers, spent = error.answers, error
    result = map_result(rows.values, answers, types, report)
    result = replace(result, num_near_duplicates=num_near)
    if spent is not None:
        raise MapBudgetError(spent, result, options.checkpoint)
    if on_error == "raise" and result.missing_rows:
        raise RowsFailedError(result)
    return result


async def llm_map_async(
    table: Any,
    prompt: str,
    fields: Sequence[str] | None = None,
    *,
    engine: Any,
    replicas: int | None = None,
    **options: Any,
) -> MapResult:
    """`llm_map` in a thread of its own: other tasks run meanwhile.

    Where the task is cancelled, the job ends with the next completion, requests that run are
    aborted, and the cancellation goes on when that is done. A checkpoint keeps the answers that
    came. An engine answers one job at a time.

    Args:
        options: the others of `llm_map`.
    """
    cleanup = ExitStack()
    opened = engine_of(engine, cleanup, replicas)
    stoppable = StoppableEngine(lambda: opened)

    def asked() -> MapResult:
        with cleanup:  # ending a model takes a while
            return llm_map(table, prompt, fields, engine=stoppable, **options)

    return await in_thread(asked, stoppable.stop)


def _text_names(question: Question, columns: Sequence[pa.ChunkedArray]) -> list[str]:
    types = [
        each.type.value_type if pa.types.is_dictionary(each.type) else each.type for each in columns
    ]
    return [
        name
        for name, type in zip(question.fields, types, strict=True)
        if is_text(type) and (question.images is None or question.images.kind_of(name) is None)
    ]


def _rows(texts: pa.Table) -> Iterator[tuple[str | None, ...]]:
    return zip(*(column.to_pylist() for column in texts.columns), strict=True)


def names_of(argument: str, given: Sequence[str] | None) -> tuple[str, ...] | None:
    """What a list of names holds; a name alone is one of them.

    Raises:
        TypeError: it holds something else.
    """
    if given is None:
        return None
    names = (given,) if isinstance(given, str) else tuple(given)
    wrong = [name for name in names if not isinstance(name, str)]
    if wrong:
        raise TypeError(f"{argument} with {wrong} given, expected names, which are strings")
    return names


def fields_of(prompt: str, table: CallerTable, fields: tuple[str, ...] | None) -> tuple[str, ...]:
    """Those that the prompt holds: None means those that it refers to, or all columns.

    Raises:
        ValueError: a column cannot be one of them.
    """
    if fields is None:
        fields = tuple(placeholders_of(prompt)) or _all_names(table)
    if "" in fields:
        raise ValueError("a field without a name was given: rename the column")
    return fields


def _all_names(table: CallerTable) -> tuple[str, ...]:
    others = [name for name in table.names if not isinstance(name, str)]
    if others:
        raise ValueError(
            f"columns {others} have names that are not strings: rename them, as with "
            f"table.rename(columns=str), or say which fields to use"
        )
    if not table.names:
        raise ValueError("a table without columns was given, expected at least one")
    return tuple(table.names)


def _check_lists(question: Question, columns: Sequence[pa.ChunkedArray]) -> None:
    for name, column in zip(question.fields, columns, strict=True):
        is_list = (
            pa.types.is_list(column.type)
            or pa.types.is_large_list(column.type)
            or pa.types.is_fixed_size_list(column.type)
            or pa.types.is_list_view(column.type)
            or pa.types.is_large_list_view(column.type)
            or pa.types.is_null(column.type)
        )
        if name in question.set_fields and not is_list:
            raise ValueError(
                f"reorder names column {name!r} of type {column.type}, expected a column of lists"
            )


def json_texts(names: Sequence[str], columns: Sequence[pa.ChunkedArray]) -> pa.Table:
    """The JSON of all values, as DuckDB writes it.

    Raises:
        ValueError: DuckDB has no type for a column.
    """

    def query(type: object) -> str:
        return f"SELECT {json_text('value', type)} FROM given"

    return pa.table(_queried(names, columns, query), names=list(names))


def group_rows(names: Sequence[str], columns: Sequence[pa.ChunkedArray]) -> DistinctRows:
    """Rows with equal values, as GROUP BY of DuckDB has it: 0.0 is -0.0, and NaN is NaN.

    Raises:
        ValueError: DuckDB has no type for a column.
    """
    first_rows = "SELECT min(row) OVER (PARTITION BY value) FROM given ORDER BY row"
    found = _queried(names, columns, lambda _: first_rows)
    return distinct_rows([each.to_numpy() for each in found])


def _queried(
    names: Sequence[str],
    columns: Sequence[pa.ChunkedArray],
    query: Callable[[object], str],
) -> list[pa.ChunkedArray]:
    """What a query by the type of a column gives for each, where it is ``value`` of ``given``."""
    found: list[pa.ChunkedArray] = []
    with duckdb.connect() as connection:
        # what timestamps with a time zone look like
        connection.execute("SET TimeZone = 'UTC'")
        for name, column in zip(names, columns, strict=True):
            try:
                rows = pa.array(np.arange(len(column)))
                connection.register("given", pa.table({"value": column, "row": rows}))
                type = connection.sql("FROM given").types[0]
                found.append(connection.sql(query(type)).to_arrow_table().column(0))
            except duckdb.Error as error:
                raise ValueError(
                    f"column {name!r} of type {column.type} given, which DuckDB does not take "
                    f"({error}): convert it, or leave it out of fields"
                ) from None
    return found


def map_result(
    values_of: Callable[[pa.ChunkedArray], Any],
    answers: pa.Table,
    types: AnswerType,
    report: JobReport,
) -> MapResult:
    """
    Args:
        values_of: the values of `MapResult` from an Arrow array.
        answers: the columns ``answer``, ``error`` and ``is_cut`` of each row.
    """
    texts = answers["answer"]
    failed = pc.indices_nonzero(pc.is_valid(answers["error"]))
    errors = dict(zip(failed.to_pylist(), answers["error"].take(failed).to_pylist(), strict=True))
    values = texts if types.output.struct is None else types.output.struct.arrow(texts)
    report.num_errors = len(errors)
    cut = pc.indices_nonzero(answers["is_cut"]).to_pylist()
    shown = values_of(values)
    return MapResult(shown, dict(sorted(errors.items())), cut, report, types, values, texts)

# SPDX-License-Identifier: Apache-2.0
"""A question to every row of a data frame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import Any, Literal, get_args

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from vllm_relay.tables.answer_types import AnswerType, answer_type
from vllm_relay.tables.caller_tables import CallerTable, arrow_columns, caller_table
from vllm_relay.tables.engines.base import Engine
from vllm_relay.tables.engines.lazy import LazyEngine
from vllm_relay.tables.engines.opening import is_engine, open_engine
from vllm_relay.tables.identifiers import json_text
from vllm_relay.tables.jobs.asking import ask
from vllm_relay.tables.jobs.estimates.estimate import JobReport
from vllm_relay.tables.jobs.options import DEFAULT_BUCKET_ROWS, JobOptions
from vllm_relay.tables.jobs.prompts.format import PromptTemplate
from vllm_relay.tables.jobs.token_budget import TokenBudgetError
from vllm_relay.tables.map_result import MapBudgetError, MapResult, RowsFailedError
from vllm_relay.tables.ordering.order import OrderChoice
from vllm_relay.tables.question import Question, placeholders_of
from vllm_relay.tables.request_options import RequestOptions

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
    system_prompt: str = "",
    sampling: Mapping[str, Any] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    extra_body: Mapping[str, Any] | None = None,
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
            a pydantic model; a JSON schema; or an `Output`. Answers that a pydantic model refuses
            are errors. A schema is what the model is held to, answers are not checked again.
        choices: the only texts that are allowed.
        order: of rows and fields in the prompts, see `JobOptions`; values are in the table's order.
        max_tokens: of an answer; None chooses by the type of the answers and the model's context.
        temperature: 0 answers greedily.
        seed: of a temperature above 0.
        reorder: those of the fields whose value is a list, and whose elements may be put in any
            order.
        rules, retry_errors, checkpoint, max_total_tokens, show_progress, template, bucket_rows: see
            `JobOptions`.
        on_error: what becomes of a row without an answer: a missing value, or an exception when all
            rows are done.
        system_prompt, sampling, chat_template_kwargs, extra_body: see `RequestOptions`.

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
    question = Question(
        prompt,
        _fields_of(prompt, rows, _names("fields", fields)),
        types.output,
        max_tokens,
        temperature,
        seed,
        _names("reorder", reorder) or (),
        RequestOptions(system_prompt, sampling, chat_template_kwargs, extra_body),
    )
    options = JobOptions(
        order,
        _names("rules", rules) or (),
        None if checkpoint is None else Path(checkpoint),
        max_total_tokens,
        show_progress,
        template or PromptTemplate(),
        bucket_rows,
        retry_errors=retry_errors,
    )
    columns = arrow_columns(rows, question.fields)
    _check_lists(question, columns)
    texts = _json_texts(question.fields, columns)
    report = JobReport()
    spent: TokenBudgetError | None = None
    with ExitStack() as cleanup:
        opened: Engine = engine
        if not is_engine(engine) or replicas is not None:
            opened = LazyEngine(lambda: open_engine(engine, replicas=replicas))
            cleanup.callback(opened.close)
        try:
            answers = ask(texts, question, opened, options, report)
        except TokenBudgetError as error:
            answers, spent = error.answers, error
    result = _result(rows, answers, types, report)
    if spent is not None:
        raise MapBudgetError(spent, result, options.checkpoint)
    if on_error == "raise" and result.missing_rows:
        raise RowsFailedError(result)
    return result


def _names(argument: str, given: Sequence[str] | None) -> tuple[str, ...] | None:
    if given is None:
        return None
    names = (given,) if isinstance(given, str) else tuple(given)
    wrong = [name for name in names if not isinstance(name, str)]
    if wrong:
        raise TypeError(f"{argument} with {wrong} given, expected names, which are strings")
    return names


def _fields_of(prompt: str, table: CallerTable, fields: tuple[str, ...] | None) -> tuple[str, ...]:
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


def _json_texts(names: Sequence[str], columns: Sequence[pa.ChunkedArray]) -> pa.Table:
    """The JSON of all values, as DuckDB writes it.

    Raises:
        ValueError: DuckDB has no type for a column.
    """
    found: list[pa.ChunkedArray] = []
    with duckdb.connect() as connection:
        # what timestamps with a time zone look like
        connection.execute("SET TimeZone = 'UTC'")
        for name, column in zip(names, columns, strict=True):
            try:
                connection.register("given", pa.table({"value": column}))
                [type] = connection.sql("FROM given").types
                shown = connection.sql(f"SELECT {json_text('value', type)} AS value FROM given")
                found.append(shown.to_arrow_table()["value"])
            except duckdb.Error as error:
                raise ValueError(
                    f"column {name!r} of type {column.type} given, which DuckDB does not take "
                    f"({error}): convert it, or leave it out of fields"
                ) from None
    return pa.table(found, names=list(names))


def _result(
    table: CallerTable, answers: pa.Table, types: AnswerType, report: JobReport
) -> MapResult:
    values = answers["answer"]
    failed = pc.indices_nonzero(pc.is_valid(answers["error"]))
    errors = dict(zip(failed.to_pylist(), answers["error"].take(failed).to_pylist(), strict=True))
    if types.model is not None:
        refused = {text: types.check(text) for text in values.unique().to_pylist() if text}
        texts = values.to_pylist()
        for place, text in enumerate(texts):
            if text and refused[text]:
                errors[place], texts[place] = refused[text], None
        values = pa.chunked_array([pa.array(texts, pa.string())])
    report.num_errors = len(errors)
    cut = pc.indices_nonzero(answers["is_cut"]).to_pylist()
    return MapResult(table.values(values), dict(sorted(errors.items())), cut, report, types, values)

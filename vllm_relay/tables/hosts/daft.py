# SPDX-License-Identifier: Apache-2.0
"""A question to every row of a data frame of Daft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from vllm_relay.arguments import check_count
from vllm_relay.tables.hosts.batches import (
    SAMPLE_ROWS,
    BatchQuestion,
    host_module,
    leading_field,
)
from vllm_relay.tables.jobs.options import DEFAULT_BUCKET_ROWS

if TYPE_CHECKING:
    from daft import DataFrame, Series

_FOUND = "vllm_relay answer"


def llm_map(
    frame: DataFrame,
    prompt: str,
    fields: Sequence[str] | None = None,
    *,
    engine: Any,
    engine_arguments: Mapping[str, Any] | None = None,
    into: str = "answer",
    errors_into: str | None = None,
    sort_by: str | None = "auto",
    batch_rows: int = DEFAULT_BUCKET_ROWS,
    **options: Any,
) -> DataFrame:
    """Ask a question of every row, when the frame is read.

    Rows are sorted by the field that saves most, and asked in batches. Equal rows of a batch are
    asked once. Rows come as they are sorted.

    Args:
        frame: of Daft.
        prompt, fields, engine, engine_arguments, into, errors_into, options: see `BatchQuestion`.
        sort_by: a column; "auto" looks at a thousand rows; None leaves rows where they are.
        batch_rows: rows that are put in order together.

    Returns:
        The frame with the answers; nothing was asked yet.

    Raises:
        TypeError: the engine is none that another process could open.
        ValueError: a field is no column, or an argument does not fit.
    """
    daft = host_module("daft", "daft")
    check_count("batch_rows", batch_rows)
    question = BatchQuestion(prompt, fields, engine, engine_arguments, into, errors_into, options)
    question.check(frame.column_names, sort_by)
    columns = list(dict.fromkeys(question.columns))
    if sort_by == "auto":
        sample = frame.select(*columns).limit(SAMPLE_ROWS).to_arrow()
        sort_by = leading_field(sample, columns)
    if sort_by is not None:
        frame = frame.sort(sort_by)
    answer_fields = question.answer_fields
    returned = daft.DataType.from_arrow_type(pa.struct(answer_fields))

    @daft.func.batch(return_dtype=returned, batch_size=batch_rows)
    def ask(*given: Series) -> pa.Array:
        batch = pa.table([each.to_arrow() for each in given], names=columns)
        found = question.ask(batch).select([each.name for each in answer_fields])
        return found.to_struct_array().combine_chunks()

    frame = frame.with_column(_FOUND, ask(*(frame[name] for name in columns)))
    for each in answer_fields:
        frame = frame.with_column(each.name, frame[_FOUND][each.name])
    return frame.exclude(_FOUND)

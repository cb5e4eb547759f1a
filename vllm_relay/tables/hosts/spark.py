# SPDX-License-Identifier: Apache-2.0
"""A question to every row of a data frame of Spark."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from vllm_relay.arguments import check_count
from vllm_relay.tables.hosts.batches import (
    SAMPLE_ROWS,
    BatchQuestion,
    host_module,
    leading_field,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def llm_map(
    frame: DataFrame,
    prompt: str,
    fields: Sequence[str] | None = None,
    *,
    engine: Any,
    engine_arguments: Mapping[str, Any] | None = None,
    partitions: int | None = None,
    into: str = "answer",
    errors_into: str | None = None,
    sort_by: str | None = None,
    **options: Any,
) -> DataFrame:
    """Ask a question of every row, when the frame is read.

    Equal rows are asked once, in the whole frame. The different ones are spread by ranges of the
    field that saves most, sorted within, and each partition is asked by the Python worker of its
    task, in batches of `spark.sql.execution.arrow.maxRecordsPerBatch` rows.

    Args:
        frame: of Spark. It is read twice: keep it if that is dear or not the same twice.
        prompt, fields, engine, engine_arguments, into, errors_into, options: see `BatchQuestion`.
        partitions: of the different rows, as many as should be asked at once; None has Spark's
            default parallelism.
        sort_by: a column of the fields; None looks at a thousand rows.

    Returns:
        The frame with the answers; nothing was asked yet.

    Raises:
        TypeError: the engine is none that another process could open.
        ValueError: a field is no column, or an argument does not fit.
    """
    host_module("pyspark.sql", "spark")
    from pyspark.sql.pandas.types import from_arrow_type
    from pyspark.sql.types import StructField, StructType

    if partitions is not None:
        check_count("partitions", partitions)
    question = BatchQuestion(prompt, fields, engine, engine_arguments, into, errors_into, options)
    question.check(frame.columns, sort_by, question.columns)
    columns = list(dict.fromkeys(question.columns))
    rows = frame.select(*(_quoted(name) for name in columns)).distinct()
    if sort_by in (None, "auto"):
        sample = pa.Table.from_pylist(
            [each.asDict() for each in rows.limit(SAMPLE_ROWS).collect()]
            or [dict.fromkeys(columns)]
        )
        sort_by = leading_field(sample, columns) or columns[0]
    count = partitions or frame.sparkSession.sparkContext.defaultParallelism
    others = [name for name in columns if name != sort_by]
    order = [_quoted(name) for name in (sort_by, *others)]
    sorted_rows = rows.repartitionByRange(count, order[0]).sortWithinPartitions(*order)
    schema = StructType(
        [
            *rows.schema.fields,
            *(
                StructField(each.name, from_arrow_type(each.type))
                for each in question.answer_fields
            ),
        ]
    )

    def ask(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield from question.ask(pa.Table.from_batches([batch])).combine_chunks().to_batches()

    answers = sorted_rows.mapInArrow(ask, schema)
    for name in columns:
        answers = answers.withColumnRenamed(name, _key(name))
    # NULL is equal to NULL here
    conditions = [frame[_quoted(name)].eqNullSafe(answers[_quoted(_key(name))]) for name in columns]
    joined = frame.join(answers, conditions, "left")
    return joined.drop(*(_key(name) for name in columns))


def _key(name: str) -> str:
    return f"{name} (asked)"


def _quoted(name: str) -> str:
    """A column's name and not a path into it."""
    return "`" + name.replace("`", "``") + "`"

# SPDX-License-Identifier: Apache-2.0
"""A question to every row of a table that need not fit into memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from vllm_relay.arguments import check_count
from vllm_relay.tables.dataframes import llm_map
from vllm_relay.tables.engines.lazy import engine_of
from vllm_relay.tables.jobs.options import DEFAULT_BUCKET_ROWS, TokenBudgetError
from vllm_relay.tables.jobs.report import JobReport
from vllm_relay.tables.map_result import MapBudgetError, MapResult

_ANSWER, _ERROR = "answer", "error"


def llm_map_file(
    source: str | PathLike[str] | pa.RecordBatchReader,
    output_path: str | PathLike[str],
    prompt: str,
    fields: Sequence[str] | None = None,
    *,
    engine: Any,
    replicas: int | None = None,
    checkpoint: str | PathLike[str] | None = None,
    max_total_tokens: int | None = None,
    batch_rows: int = DEFAULT_BUCKET_ROWS,
    **options: Any,
) -> JobReport:
    """`llm_map` in parts: rows are read, asked about and written as a row group, and then the next.

    Memory does not grow with the number of rows. Rows are ordered within their part; equal rows of
    several parts are asked about once. The file is written beside `output_path`, with ``.part``
    behind its name, and has that name when it is whole: a job that is killed or ends with an
    exception leaves no file of that name, or the one that was there before. With a checkpoint the
    same call then asks only what is missing.

    Args:
        source: a Parquet file, or a reader, which is read to its end.
        output_path: a Parquet file with all columns of the source, and ``answer`` and ``error``.
        batch_rows: of a part.
        prompt, fields, engine, replicas, checkpoint, max_total_tokens: see `llm_map`.
        options: the others of `llm_map`. With ``on_error="raise"`` the first part that has a row
            without an answer is the last.

    Returns:
        What the job took.

    Raises:
        OSError: a file cannot be read or written.
        TypeError, ValueError: as for `llm_map`, or the source has a column ``answer`` or ``error``.
            Nothing was asked yet.
        CheckpointError, EngineError, RowsFailedError: as for `llm_map`; the ``result`` of an error
            is that of the last part.
        TokenBudgetError: there are not enough tokens for all prompts.
    """
    check_count("batch_rows", batch_rows)
    target = Path(output_path)
    if not isinstance(source, (str, PathLike, pa.RecordBatchReader)):
        raise TypeError(
            f"a source of type {type(source).__name__} given, expected a Parquet file or a "
            "pyarrow.RecordBatchReader: for a table in memory use llm_map"
        )
    is_file = not isinstance(source, pa.RecordBatchReader)
    if is_file and target.exists() and Path(source).exists() and target.samefile(source):
        raise ValueError(f"{target} given as source and output: give the output another name")
    part = target.with_name(f"{target.name}.part")
    report = JobReport()
    with ExitStack() as cleanup:
        if not isinstance(source, pa.RecordBatchReader):
            source = cleanup.enter_context(_parquet_reader(Path(source), batch_rows))
        taken = sorted({_ANSWER, _ERROR} & set(source.schema.names))
        if taken:
            raise ValueError(
                f"a source with columns {taken} given, which the output has of its own: rename them"
            )
        opened = engine_of(engine, cleanup, replicas)
        if checkpoint is None:
            folder = cleanup.enter_context(TemporaryDirectory(prefix="relay-answers-"))
            kept = Path(folder, "answers")
        else:
            kept = Path(checkpoint)

        def answered(table: pa.Table) -> MapResult:
            left = None
            if max_total_tokens is not None:
                left = max(max_total_tokens - report.prompt_tokens - report.output_tokens, 1)
            return llm_map(
                table,
                prompt,
                fields,
                engine=opened,
                checkpoint=kept,
                max_total_tokens=left,
                **options,
            )

        # what does not fit is refused before there is a file
        nothing = source.schema.empty_table()
        whole = _with_answers(nothing, answered(nothing))
        cleanup.callback(part.unlink, missing_ok=True)
        with pq.ParquetWriter(part, whole.schema) as writer:
            for table in _parts(source, batch_rows):
                try:
                    result = answered(table)
                except MapBudgetError as error:
                    report.add(error.result.report)
                    raise _budget_error(max_total_tokens, report, checkpoint) from error
                report.add(result.report)
                writer.write_table(_with_answers(table, result))
        os.replace(part, target)
    return report


def _budget_error(
    max_total_tokens: int | None, report: JobReport, checkpoint: str | PathLike[str] | None
) -> TokenBudgetError:
    limit = f"the budget of {max_total_tokens:,} tokens is spent"
    spent = report.prompt_tokens + report.output_tokens
    advice = "without a checkpoint the answers that came are gone: raise max_total_tokens"
    if checkpoint is not None:
        advice = (
            f"the checkpoint {checkpoint} keeps the answers that came: raise max_total_tokens and "
            f"ask again to go on"
        )
    return TokenBudgetError(f"{limit} ({spent:,} used), and rows are left", advice, limit)


def _parquet_reader(path: Path, batch_rows: int) -> pa.RecordBatchReader:
    file = pq.ParquetFile(path)
    return pa.RecordBatchReader.from_batches(
        file.schema_arrow, file.iter_batches(batch_size=batch_rows)
    )


def _parts(reader: pa.RecordBatchReader, num_rows: int) -> Iterator[pa.Table]:
    """All rows, so many at a time: a reader's batches have any size."""
    batches: list[pa.RecordBatch] = []
    num_held = 0
    for batch in reader:
        while num_held + batch.num_rows >= num_rows:
            missing = num_rows - num_held
            yield pa.Table.from_batches([*batches, batch.slice(0, missing)], reader.schema)
            batch = batch.slice(missing)
            batches, num_held = [], 0
        if batch.num_rows:
            batches.append(batch)
            num_held += batch.num_rows
    if num_held:
        yield pa.Table.from_batches(batches, reader.schema)


def _with_answers(table: pa.Table, result: MapResult) -> pa.Table:
    errors = pa.array([result.errors.get(place) for place in range(len(result))], pa.string())
    return table.append_column(_ANSWER, result.arrow_values).append_column(_ERROR, errors)

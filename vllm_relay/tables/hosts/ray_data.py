# SPDX-License-Identifier: Apache-2.0
"""A question to every row of a dataset of Ray Data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from vllm_relay.arguments import check_count
from vllm_relay.tables.hosts.batches import (
    SAMPLE_ROWS,
    BatchQuestion,
    leading_field,
)
from vllm_relay.tables.jobs.options import DEFAULT_BUCKET_ROWS

if TYPE_CHECKING:
    from ray.data import Dataset


def llm_map(
    dataset: Dataset,
    prompt: str,
    fields: Sequence[str] | None = None,
    *,
    engine: Any,
    engine_arguments: Mapping[str, Any] | None = None,
    replicas: int = 1,
    gpus_per_replica: float = 0,
    into: str = "answer",
    errors_into: str | None = None,
    sort_by: str | None = "auto",
    batch_rows: int = DEFAULT_BUCKET_ROWS,
    **options: Any,
) -> Dataset:
    """Ask a question of every row, when the dataset is read.

    Rows are sorted by the field that saves most, so that those which begin alike come to one
    replica, one after the other; in each batch rows and fields are put in order as `llm_map` of
    data frames does. Equal rows of a batch are asked once. Rows come as they are sorted.

    Args:
        dataset: of Ray Data.
        prompt, fields, engine, engine_arguments, into, errors_into, options: see `BatchQuestion`.
        replicas: actors that ask.
        gpus_per_replica: GPUs that Ray gives each of them.
        sort_by: a column; "auto" looks at a thousand rows; None leaves rows where they are, which
            needs no second pass over the data.
        batch_rows: rows that are put in order together.

    Returns:
        A dataset with the answers; nothing was asked yet.

    Raises:
        TypeError: the engine is none that another process could open.
        ValueError: a field is no column, or an argument does not fit.
    """
    check_count("replicas", replicas)
    check_count("batch_rows", batch_rows)
    question = BatchQuestion(prompt, fields, engine, engine_arguments, into, errors_into, options)
    if gpus_per_replica < 0:
        raise ValueError(f"gpus_per_replica={gpus_per_replica} given, expected 0 or more")
    columns = dataset.columns() or []
    question.check(columns, sort_by)
    if sort_by == "auto":
        fields_only = dataset.select_columns(list(dict.fromkeys(question.columns)))
        sample = fields_only.take(SAMPLE_ROWS)
        sort_by = leading_field(pa.Table.from_pylist(sample), question.columns) if sample else None
    if sort_by is not None:
        dataset = dataset.sort(sort_by)
    return dataset.map_batches(
        _Replica,
        fn_constructor_args=(question,),
        batch_format="pyarrow",
        batch_size=batch_rows,
        concurrency=replicas,
        num_gpus=gpus_per_replica or None,
    )


class _Replica:
    """An actor's: its engine is opened with the first batch."""

    def __init__(self, question: BatchQuestion) -> None:
        self._question = question

    def __call__(self, batch: pa.Table) -> pa.Table:
        return self._question.ask(batch)

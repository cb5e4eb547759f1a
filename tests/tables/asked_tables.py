# SPDX-License-Identifier: Apache-2.0
"""Tables of each kind, and one question to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa

from tests.tables.recording_engine import RecordingEngine, Row
from vllm_relay.tables import MapResult, llm_map

KINDS: dict[str, Callable[[pa.Table], Any]] = {
    "arrow": lambda table: table,
    "pandas": lambda table: table.to_pandas(),
    "polars": lambda table: pl.DataFrame(pl.from_arrow(table)),
}


def ask(
    table: Any, answer: Callable[[Row], str] | None = None, **options: Any
) -> tuple[MapResult, RecordingEngine]:
    engine = RecordingEngine(answer) if answer else RecordingEngine()
    return llm_map(table, "What is it?", engine=engine, **options), engine


def listed(values: Any) -> list[Any]:
    """Values of any kind, None where one is missing."""
    if isinstance(values, pd.Series):
        return [None if pd.isna(value) else value for value in values]
    return values.to_pylist() if isinstance(values, pa.ChunkedArray) else values.to_list()

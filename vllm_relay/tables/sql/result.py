# SPDX-License-Identifier: Apache-2.0
"""What a statement gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import duckdb

from vllm_relay.tables.jobs.report import JobReport

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped]  # has no stubs here
    import polars
    import pyarrow

    from vllm_relay.tables.sql.jobs import CallError


class Result:
    """Rows that DuckDB gives when they are asked for; answers are there before.

    As an iterable all rows, each time.

    Args:
        relation: of the rows.
        errors: of distinct rows that have no answer, the first 10,000 of each job; `report` has
            their number.
        report: of the jobs.
        num_lost: different rows that were asked about, where none of them has an answer.
    """

    def __init__(
        self,
        relation: duckdb.DuckDBPyRelation | None,
        errors: list[CallError] | None = None,
        report: JobReport | None = None,
        num_lost: int = 0,
    ) -> None:
        self._relation = relation
        self.errors = errors or []
        self.report = report or JobReport()
        self.num_lost = num_lost
        self._one_by_one: Iterator[tuple[Any, ...]] | None = None

    def __repr__(self) -> str:
        """The first rows as a table, and how many have no answer."""
        shown = "no rows" if self._relation is None else str(self._relation).rstrip()
        num_errors = self.report.num_errors
        return f"{shown}\n{num_errors:,} without an answer" if num_errors else shown

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return iter(self.fetchall())

    @property
    def has_rows(self) -> bool:
        """Whether the statement gives rows, also none."""
        return self._relation is not None

    @property
    def relation(self) -> duckdb.DuckDBPyRelation:
        """For more of DuckDB; it is valid as long as this result.

        Raises:
            ValueError: the statement gives no rows.
        """
        if self._relation is None:
            raise ValueError("the statement gives no rows")
        return self._relation

    @property
    def columns(self) -> list[str]:
        return self.relation.columns

    def fetchall(self) -> list[tuple[Any, ...]]:
        """All rows, each time."""
        return self.relation.select("*").fetchall()

    def fetchone(self) -> tuple[Any, ...] | None:
        """The next row, from the first on; None behind the last."""
        if self._one_by_one is None:
            self._one_by_one = iter(self)
        return next(self._one_by_one, None)

    def df(self) -> pandas.DataFrame:
        return self.relation.df()

    def pl(self) -> polars.DataFrame:
        return self.relation.pl()

    def arrow(self) -> pyarrow.Table:
        return self.relation.to_arrow_table()

# SPDX-License-Identifier: Apache-2.0
"""What a statement gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import duckdb

from vllm_relay.tables.jobs.estimate import JobReport

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped]  # has no stubs here
    import polars
    import pyarrow

    from vllm_relay.tables.sql.jobs import CallError


class Result:
    """Rows that DuckDB gives when they are asked for; answers are there before.

    Args:
        relation: of the rows.
        errors: of distinct rows that have no answer, the first 10,000 of each job; `report` has
            their number.
        report: of the jobs.
    """

    def __init__(
        self,
        relation: duckdb.DuckDBPyRelation | None,
        errors: list[CallError] | None = None,
        report: JobReport | None = None,
    ) -> None:
        self._relation = relation
        self.errors = errors or []
        self.report = report or JobReport()

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

    def df(self) -> pandas.DataFrame:
        return self.relation.df()

    def pl(self) -> polars.DataFrame:
        return self.relation.pl()

    def arrow(self) -> pyarrow.Table:
        return self.relation.to_arrow_table()

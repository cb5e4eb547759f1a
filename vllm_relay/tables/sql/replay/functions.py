# SPDX-License-Identifier: Apache-2.0
"""The functions of DuckDB that stand for calls."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import duckdb
import pyarrow as pa

from vllm_relay.tables.images import DUCKDB_TYPES, ImageKind, ImageStore, references
from vllm_relay.tables.jobs.answers import ARROW_TYPES, Answer
from vllm_relay.tables.outputs import Output, OutputType
from vllm_relay.tables.sql.database import is_valid
from vllm_relay.tables.sql.replay.answers import Answers

_numbers = itertools.count(1)

_OPTIONS: dict[str, Any] = {"type": "arrow", "null_handling": "special", "side_effects": False}
_PARAMETERS: list[Any] = ["BIGINT", "VARCHAR[]", "UBIGINT[]"]
SQL_TYPES: dict[OutputType, str] = {
    "text": "VARCHAR",
    "int": "BIGINT",
    "float": "DOUBLE",
    "bool": "BOOLEAN",
    "json": "VARCHAR",
}


class Functions:
    """
    Args:
        connection: on which they are made, and stay.

    Attributes:
        answers: that they give; None: they give NULL.
    """

    def __init__(self, connection: duckdb.DuckDBPyConnection, images: ImageStore) -> None:
        self._connection = connection
        self.images = images
        self._prefix = ""
        self.answers: Answers | None = None

    def ensure(self) -> None:
        """Make those that are not there: a transaction that is rolled back takes them along."""
        if self._prefix and is_valid(self._connection, f"SELECT {self.missing(0, 'NULL')}"):
            return
        # Python's side knows the old names for good
        self._prefix = f"relay_{next(_numbers)}_"
        for name, sql_type in SQL_TYPES.items():
            self._make(name, sql_type, ARROW_TYPES[name], lambda answer: answer.value, True)
        for kind, parameter in DUCKDB_TYPES.items():
            self._connection.create_function(
                f"{self._prefix}image_{kind}",
                self._referring(kind),
                [parameter],
                "VARCHAR",
                **_OPTIONS,
            )
        self._make("error", "VARCHAR", pa.string(), lambda answer: answer.error, False)
        self._make("missing", "BIGINT", pa.int64(), None, False)

    def _referring(self, kind: ImageKind) -> Callable[[Any], pa.Array]:
        return lambda values: references(values, kind, self.images)

    def _make(
        self,
        name: str,
        sql_type: str,
        arrow_type: pa.DataType,
        value_of: Callable[[Answer], Any] | None,
        counts: bool,
    ) -> None:
        def function(sites: pa.Array, keys: pa.Array, anchors: pa.Array) -> pa.Array:
            answers = self.answers
            if answers is None:
                # DuckDB evaluates constants while it looks at a statement
                return pa.nulls(len(sites), arrow_type)
            site = sites[0].as_py() if len(sites) else 0
            is_counted = site >= 0
            site = site if is_counted else ~site
            # a row that an outer join adds has no key, and so no answer
            rows = [None if key is None else tuple(key) for key in keys.to_pylist()]
            if value_of is None:
                return pa.array(answers.numbers_of_missing(site, rows), arrow_type)
            known = answers.look_up(site, rows, counts and is_counted)
            return pa.array(
                [None if value is None else value_of(value) for value in known], arrow_type
            )

        self._connection.create_function(
            self._prefix + name,
            function,
            _PARAMETERS,
            sql_type,
            **_OPTIONS,
        )

    def call(
        self, output: Output, site: int, key: str, anchors: str = "[]", is_counted: bool = True
    ) -> str:
        """
        Args:
            is_counted: what is missing counts as that; it does not where it is looked at beside.
        """
        given = site if is_counted else ~site
        kind = "json" if output.is_json else output.type
        text = f"{self._prefix}{kind}({given}, {key}, {anchors})"
        if output.struct is not None:
            return f"({text}::JSON::{output.struct.type.sql})"
        return f"({text}::JSON)" if output.is_json else text

    def image(self, kind: ImageKind, value: str) -> str:
        """A reference to the image that a value stands for."""
        return f"{self._prefix}image_{kind}({value})"

    def error(self, site: int, key: str) -> str:
        return f"{self._prefix}error({site}, {key}, [])"

    def missing(self, site: int, key: str) -> str:
        return f"{self._prefix}missing({site}, {key}, [])"

# SPDX-License-Identifier: Apache-2.0
"""Answers that are known, and what is missing."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

import duckdb
import pyarrow as pa

from vllm_relay.tables.identifiers import ANSWER, ERROR, quoted
from vllm_relay.tables.sql.temporary_tables import TemporaryTables
from vllm_relay.tables.sql.text.call_sites import Site

Key = tuple[str | None, ...]
"""Type and JSON of each field's value."""
Answer = tuple[Any, str | None]


class Ask(Protocol):
    """What answers: `JobRunner.answer`, with what is made of errors."""

    def __call__(self, source: str, site: Site, target: str) -> None: ...


class Answers:
    """Of one statement.

    Args:
        connection: of DuckDB.
        tables: for temporary ones.
        sites: by number.
        order: of the sites' numbers, what decides about others first.
    """

    def __init__(
        self,
        connection: duckdb.DuckDBPyConnection,
        tables: TemporaryTables,
        sites: list[Site],
        order: list[int],
    ) -> None:
        self._connection = connection
        self._tables = tables
        self._sites = sites
        self._known: list[dict[Key, Answer]] = [{} for _ in sites]
        self.missing: list[dict[Key, int]] = [{} for _ in sites]
        # how often rows were there that were asked about
        self.asked: list[dict[Key, int]] = [{} for _ in sites]
        self._order = order
        # DuckDB calls functions from several threads
        self._lock = threading.Lock()
        # rows that were looked at and are missing, by number
        self.numbered: list[tuple[int, Key]] = []
        # whether asking for numbers counts as missing an answer
        self.counts_looks = False
        self._numbers: dict[tuple[int, Key], int] = {}

    def begin_pass(self) -> None:
        for missing in self.missing:
            missing.clear()

    def look_up(self, site: int, keys: list[Key | None], counts: bool) -> list[Answer | None]:
        known, missing = self._known[site], self.missing[site]
        found = [None if key is None else known.get(key) for key in keys]
        if not counts:
            return found
        with self._lock:
            for key, value in zip(keys, found, strict=True):
                if value is None and key is not None:
                    missing[key] = missing.get(key, 0) + 1
        return found

    def numbers_of_missing(self, site: int, keys: list[Key | None]) -> list[int | None]:
        known = self._known[site]
        if self.counts_looks:
            self.look_up(site, keys, True)
        with self._lock:
            return [
                None if key is None or key in known else self._number((site, key)) for key in keys
            ]

    def _number(self, one: tuple[int, Key]) -> int:
        number = self._numbers.get(one)
        if number is None:
            number = self._numbers[one] = len(self.numbered)
            self.numbered.append(one)
        return number

    def first_missing(self) -> int | None:
        """The site to ask next; None if nothing is missing."""
        return next((site for site in self._order if self.missing[site]), None)

    def is_known(self, site: int, key: Key) -> bool:
        return key in self._known[site]

    def source(self, site: int, counts: dict[Key, int]) -> tuple[str, str]:
        """A query of the fields' values, and the table that it reads: the number of each key is
        ``i`` there, its fields are ``f0``, ``f1`` and so on.

        Args:
            counts: how often each key is there; all have the same types.
        """
        names = self._sites[site].question.fields
        types = next(iter(counts))[::2]
        columns = {
            "i": pa.array(range(len(counts)), pa.int64()),
            "n": pa.array(list(counts.values()), pa.int64()),
        }
        for index in range(len(names)):
            columns[f"j{index}"] = pa.array([key[2 * index + 1] for key in counts], pa.string())
        name = self._tables.new_name()
        self._connection.register(f"{name}_given", pa.table(columns))
        values = [
            f"{_value(f'j{index}', kind or '')} AS f{index}" for index, kind in enumerate(types)
        ]
        self._connection.execute(
            f"CREATE TEMP TABLE {name} AS SELECT {', '.join(['i', 'n', *values])} FROM {name}_given"
        )
        self._connection.unregister(f"{name}_given")
        listed = ", ".join(f"f{index} AS {quoted(part)}" for index, part in enumerate(names))
        rows = f"{name}, range(n)" if max(counts.values()) > 1 else name
        return f"SELECT {listed} FROM {rows} ORDER BY i", name

    def by_types(self, counts: dict[Key, int]) -> list[dict[Key, int]]:
        groups: dict[tuple[str | None, ...], dict[Key, int]] = {}
        for key, count in counts.items():
            groups.setdefault(key[::2], {})[key] = count
        return list(groups.values())

    def ask(self, site: int, counts: dict[Key, int], ask: Ask) -> None:
        """Ask about rows of a site.

        Raises:
            RuntimeError: one has neither an answer nor an error.
        """
        if not counts:
            return
        known, asked = self._known[site], self.asked[site]
        for key, count in counts.items():
            asked[key] = asked.get(key, 0) + count
        names = self._sites[site].question.fields
        for group in self.by_types(counts):
            keys = list(group)
            source, table = self.source(site, group)
            target = self._tables.new_name()
            ask(source, self._sites[site], target)
            same = " AND ".join(
                f"to_json(k.f{index}) IS NOT DISTINCT FROM to_json(t.{quoted(name)})"
                for index, name in enumerate(names)
            )
            rows = self._connection.execute(
                f"SELECT k.i, t.{ANSWER}, t.{ERROR} FROM {table} k JOIN {target} t ON {same}"
            ).fetchall()
            for number, answer, error in rows:
                known[keys[number]] = (answer, error)
            num_missing = sum(group[key] for key in keys if key not in known)
            self._tables.drop(target)
            self._tables.drop(table)
            if num_missing:
                raise RuntimeError(
                    f"{num_missing} rows have neither an answer nor an error to "
                    f"{self._sites[site].text}"
                )

    def ask_numbers(self, numbers: list[int], ask: Ask) -> None:
        """Ask about rows by their numbers; those of the first site only if there are several."""
        by_site: dict[int, dict[Key, int]] = {}
        for number in numbers:
            site, key = self.numbered[number]
            if key not in self._known[site]:
                counts = by_site.setdefault(site, {})
                counts[key] = counts.get(key, 0) + 1
        for site in sorted(by_site):
            self.ask(site, by_site[site], ask)


def _value(column: str, kind: str) -> str:
    """A value of a type from its JSON."""
    if '"NULL"' in kind:
        kind = kind.replace('"NULL"', "INTEGER")
    if kind in ("VARCHAR", "BIT"):
        text = f"({column}::JSON ->> '$')"
        return text if kind == "VARCHAR" else f"{text}::{kind}"
    return f"CAST({column}::JSON AS {kind})"


def key_text(values: Sequence[str]) -> str:
    """A key of the texts of its fields' values."""
    parts = [f"typeof({value}), to_json({value})::VARCHAR" for value in values]
    return f"[{', '.join(parts)}]::VARCHAR[]" if parts else "[]::VARCHAR[]"

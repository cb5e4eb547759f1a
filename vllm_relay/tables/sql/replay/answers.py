# SPDX-License-Identifier: Apache-2.0
"""Answers that are known, and what is missing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

from vllm_relay.tables.jobs.answers import Answer
from vllm_relay.tables.sql.jobs import Counts, Key
from vllm_relay.tables.sql.text.call_sites import Site

Ask: TypeAlias = "Callable[[Site, Counts], list[Answer]]"
"""What answers: `StatementJobs.answer`."""


class Answers:
    """Of one statement.

    Args:
        sites: by number.
        order: of the sites' numbers, what decides about others first.
    """

    def __init__(self, sites: list[Site], order: list[int]) -> None:
        self._sites = sites
        self._known: list[dict[Key, Answer]] = [{} for _ in sites]
        self.missing: list[Counts] = [{} for _ in sites]
        # how often rows were there that were asked about
        self.asked: list[Counts] = [{} for _ in sites]
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

    def ask(self, site: int, counts: Counts, ask: Ask) -> None:
        """Ask about rows of a site."""
        if not counts:
            return
        asked = self.asked[site]
        for key, count in counts.items():
            asked[key] = asked.get(key, 0) + count
        answers = ask(self._sites[site], counts)
        self._known[site].update(zip(counts, answers, strict=True))

    def ask_numbers(self, numbers: list[int], ask: Ask) -> None:
        """Ask about rows by their numbers; those of the first site only if there are several."""
        by_site: dict[int, Counts] = {}
        for number in numbers:
            site, key = self.numbered[number]
            if key not in self._known[site]:
                counts = by_site.setdefault(site, {})
                counts[key] = counts.get(key, 0) + 1
        for site in sorted(by_site):
            self.ask(site, by_site[site], ask)


def key_text(values: Sequence[str]) -> str:
    """A key of the texts of its fields' values."""
    parts = [f"typeof({value}), to_json({value})::VARCHAR" for value in values]
    return f"[{', '.join(parts)}]::VARCHAR[]" if parts else "[]::VARCHAR[]"

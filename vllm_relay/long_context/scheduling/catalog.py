# SPDX-License-Identifier: Apache-2.0
"""Which contexts there are, as the scheduler knows them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from vllm_relay.long_context.orders import DELETED, ContextReport
from vllm_relay.long_context.scheduling.context_record import ContextRecord, with_parents
from vllm_relay.sparse.contexts.tokens import longest_prefix


class ContextCatalog:
    """The contexts that every worker has."""

    def __init__(self) -> None:
        self._records: dict[str, ContextRecord] = {}
        self._uses = 0

    def __contains__(self, context_id: str) -> bool:
        return context_id in self._records

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[ContextRecord]:
        return iter(self._records.values())

    def __getitem__(self, context_id: str) -> ContextRecord:
        return self._records[context_id]

    def get(self, context_id: str) -> ContextRecord | None:
        return self._records.get(context_id)

    @property
    def file_bytes(self) -> int:
        """Of all of them, and of what they continue."""
        return sum(each.file_bytes for each in with_parents(self))

    def add(self, record: ContextRecord) -> None:
        """Makes a context known, as the one used last."""
        self._records[record.id] = record
        self.use(record.id)

    def remove(self, context_id: str) -> None:
        """Forgets a context, if it is known."""
        self._records.pop(context_id, None)

    def update(self, reports: Iterable[ContextReport], num_ranks: int) -> None:
        """Takes over what the workers say of those that are known, and of what these continue."""
        links = {each.id: each for each in with_parents(self)}
        links |= self._records
        taken = []
        for report in reports:
            is_link = report.state == DELETED
            if is_link and report.context_id not in links:
                links[report.context_id] = ContextRecord(report.context_id, np.empty(0, np.int64))
            if report.context_id in (links if is_link else self):
                links[report.context_id].take(report, num_ranks)
                taken.append(report)
        for report in taken:
            record, parent = links[report.context_id], links.get(report.parent_id or "")
            # in memory, another one of the same tokens is not what is continued
            if record.parent_id != report.parent_id or (parent is not None and parent.file_bytes):
                record.parent = parent

    def use(self, context_id: str) -> None:
        """A request reuses the context, and what that continues: these leave later than it, since
        nothing is freed as long as it is there.

        Raises:
            KeyError: it is not known.
        """
        for each in with_parents([self._records[context_id]]):
            self._uses += 1
            each.last_use = self._uses

    def by_last_use(self) -> list[ContextRecord]:
        """The one used least recently first."""
        return sorted(self, key=lambda each: each.last_use)

    def of_clients(self) -> list[ContextRecord]:
        """Those that requests asked for, the one used least recently first."""
        return [each for each in self.by_last_use() if each.is_clients]

    def in_leaving_order(self) -> list[ContextRecord]:
        """First those that requests asked for, of these and the others the one used least recently
        first."""
        return sorted(self.by_last_use(), key=lambda each: not each.is_clients)

    def longest_prefix(self, tokens: np.ndarray) -> tuple[str | None, int]:
        """The id of the context that shares most first tokens with `tokens`, and how many."""
        readable = (each for each in self if not each.is_refused)
        record, length = longest_prefix(readable, tokens)
        return None if record is None else record.id, length

# SPDX-License-Identifier: Apache-2.0
"""Which contexts there are, as the scheduler knows them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from vllm_relay.long_context.orders import DELETED, ContextReport
from vllm_relay.sparse.contexts.tokens import longest_prefix


@dataclass(eq=False)
class HeldMemory:
    """Host memory of a context as it was once: it counts as long as somebody reads it so."""

    num_bytes: int = 0


@dataclass(eq=False)
class ContextRecord:
    """A context that requests may reuse, or that others continue. Later there may be another one of
    the same id.

    Attributes:
        tokens: int64 [n]; none of one that was deleted before this process began.
        parent: what it continues, and keeps as long as it is there.
        is_clients: a request asked for it; else it is the operator's.
        num_own_tokens: the last ones, which the context that it continues does not have.
        last_use: grows with every use.
        memory: what it takes besides its parent.
        file_bytes: of all ranks, besides its parent's.
        is_refused: it could not be kept, and is known for the reason only.
    """

    id: str
    tokens: np.ndarray
    parent: ContextRecord | None = None
    is_clients: bool = False
    num_own_tokens: int = 0
    last_use: int = 0
    memory: HeldMemory = field(default_factory=HeldMemory)
    file_bytes: int = 0
    is_refused: bool = False

    @property
    def parent_id(self) -> str | None:
        return None if self.parent is None else self.parent.id

    def take(self, report: ContextReport, num_ranks: int) -> None:
        """What a worker says of it. If it takes less memory than before, those that read it keep
        what it took."""
        memory_bytes = report.memory_bytes * num_ranks
        if memory_bytes < self.memory.num_bytes:
            self.memory = HeldMemory()
        self.memory.num_bytes = memory_bytes
        self.file_bytes = report.file_bytes * num_ranks
        self.num_own_tokens = report.num_own_tokens
        self.is_refused = report.is_refused


def with_parents(records: Iterable[ContextRecord]) -> list[ContextRecord]:
    """And all that they continue, each once."""
    found: dict[ContextRecord, None] = {}
    for each in records:
        record: ContextRecord | None = each
        while record is not None and record not in found:
            found[record] = None
            record = record.parent
    return list(found)


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
        nothing is freed as long as it is there. Raises KeyError: it is not known."""
        for each in with_parents([self._records[context_id]]):
            self._uses += 1
            each.last_use = self._uses

    def in_leaving_order(self) -> list[ContextRecord]:
        """First those that requests asked for, of these and the others the one used least recently
        first."""
        return sorted(self, key=lambda each: (not each.is_clients, each.last_use))

    def longest_prefix(self, tokens: np.ndarray) -> tuple[str | None, int]:
        """The id of the context that shares most first tokens with `tokens`, and how many."""
        readable = (each for each in self if not each.is_refused)
        record, length = longest_prefix(readable, tokens)
        return None if record is None else record.id, length

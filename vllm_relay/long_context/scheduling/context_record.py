# SPDX-License-Identifier: Apache-2.0
"""What the scheduler knows of a context."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from vllm_relay.long_context.orders import ContextReport


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

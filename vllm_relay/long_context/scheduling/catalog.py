# SPDX-License-Identifier: Apache-2.0
"""Which contexts there are, as the scheduler knows them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_relay.sparse.contexts.tokens import longest_prefix


@dataclass(eq=False)
class CatalogEntry:
    """A context that requests may reuse.

    Attributes:
        tokens: int64 [n].
        parent_id: of the context that it continues.
        last_use: grows with every use.
    """

    id: str
    tokens: np.ndarray
    parent_id: str | None = None
    last_use: int = 0


class ContextCatalog:
    """The contexts that every worker has."""

    def __init__(self) -> None:
        self._entries: dict[str, CatalogEntry] = {}
        self._uses = 0

    def __contains__(self, context_id: str) -> bool:
        return context_id in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, context_id: str, tokens: np.ndarray, parent_id: str | None = None) -> None:
        """Makes a context known, as the one used last."""
        array = np.asarray(tokens, np.int64)
        self._entries[context_id] = CatalogEntry(context_id, array, parent_id)
        self.use(context_id)

    def parent_of(self, context_id: str) -> str | None:
        return self._entries[context_id].parent_id

    def set_parent(self, context_id: str, parent_id: str | None) -> None:
        """What a context continues may change while it is stored."""
        self._entries[context_id].parent_id = parent_id

    def remove(self, context_id: str) -> None:
        """Forgets a context, if it is known."""
        self._entries.pop(context_id, None)

    def use(self, context_id: str) -> None:
        """A request reuses the context, and what that continues: these leave later than it, since
        nothing is freed as long as it is there."""
        entry: CatalogEntry | None = self._entries[context_id]
        seen: list[CatalogEntry] = []
        while entry is not None and entry not in seen:
            seen.append(entry)
            self._uses += 1
            entry.last_use = self._uses
            entry = None if entry.parent_id is None else self._entries.get(entry.parent_id)

    def by_last_use(self) -> list[str]:
        """Ids, the one used least recently first."""
        return sorted(self._entries, key=lambda each: self._entries[each].last_use)

    def longest_prefix(self, tokens: np.ndarray) -> tuple[str | None, int]:
        """The id of the context that shares most first tokens with `tokens`, and how many."""
        entry, length = longest_prefix(self._entries.values(), tokens)
        return None if entry is None else entry.id, length

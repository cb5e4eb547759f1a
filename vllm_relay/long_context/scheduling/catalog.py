# SPDX-License-Identifier: Apache-2.0
"""Which contexts there are, as the scheduler knows them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_relay.sparse.contexts.tokens import longest_prefix


@dataclass
class CatalogEntry:
    """A context that requests may reuse.

    Attributes:
        tokens: int64 [n].
        last_use: grows with every use.
    """

    id: str
    tokens: np.ndarray
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

    def add(self, context_id: str, tokens: np.ndarray) -> None:
        """Makes a context known, as the one used last."""
        self._entries[context_id] = CatalogEntry(context_id, np.asarray(tokens, np.int64))
        self.use(context_id)

    def remove(self, context_id: str) -> None:
        """Forgets a context, if it is known."""
        self._entries.pop(context_id, None)

    def use(self, context_id: str) -> None:
        """A request reuses the context."""
        self._uses += 1
        self._entries[context_id].last_use = self._uses

    def by_last_use(self) -> list[str]:
        """Ids, the one used least recently first."""
        return sorted(self._entries, key=lambda each: self._entries[each].last_use)

    def longest_prefix(self, tokens: np.ndarray) -> tuple[str | None, int]:
        """The id of the context that shares most first tokens with `tokens`, and how many."""
        entry, length = longest_prefix(self._entries.values(), tokens)
        return None if entry is None else entry.id, length

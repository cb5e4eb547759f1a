# SPDX-License-Identifier: Apache-2.0
"""Which contexts there are, as the scheduler knows them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_relay.sparse.contexts.tokens import common_prefix_len


@dataclass
class CatalogEntry:
    """A context that requests may reuse.

    Attributes:
        tokens: int64 [n].
        is_clients: a request asked for it; else it is the operator's.
        last_use: grows with every use.
    """

    id: str
    tokens: np.ndarray
    is_clients: bool = False
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

    def add(self, context_id: str, tokens: np.ndarray, *, is_clients: bool = False) -> None:
        """Makes a context known, as the one used last."""
        tokens = np.asarray(tokens, np.int64)
        self._entries[context_id] = CatalogEntry(context_id, tokens, is_clients)
        self.use(context_id)

    def remove(self, context_id: str) -> None:
        """Forgets a context, if it is known."""
        self._entries.pop(context_id, None)

    def use(self, context_id: str) -> None:
        """A request reuses the context."""
        self._uses += 1
        self._entries[context_id].last_use = self._uses

    def give_to_operator(self, context_id: str) -> None:
        """The operator asks for a context that a request has asked for."""
        self._entries[context_id].is_clients = False

    def by_last_use(self) -> list[str]:
        """Ids, the one used least recently first."""
        return sorted(self._entries, key=lambda each: self._entries[each].last_use)

    def of_clients(self) -> list[CatalogEntry]:
        """Those that requests asked for, the one used least recently first."""
        entries = [self._entries[each] for each in self.by_last_use()]
        return [each for each in entries if each.is_clients]

    def in_leaving_order(self) -> list[str]:
        """Ids: first those that requests asked for, of these and the others the one used least
        recently first."""
        return sorted(self.by_last_use(), key=lambda each: not self._entries[each].is_clients)

    def longest_prefix(self, tokens: np.ndarray) -> tuple[str | None, int]:
        """The context that shares most first tokens with `tokens`, and how many; of several the
        shortest, whose index holds least besides."""
        best: CatalogEntry | None = None
        best_len = 0
        for entry in self._entries.values():
            length = common_prefix_len(entry.tokens, tokens)
            if length == 0 or length < best_len:
                continue
            if best is None or length > best_len or len(entry.tokens) < len(best.tokens):
                best, best_len = entry, length
        return (None, 0) if best is None else (best.id, best_len)

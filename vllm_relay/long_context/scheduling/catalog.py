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
        is_clients: a request asked for it; else it is the operator's.
        num_own_tokens: the last ones, which the context that it continues does not have.
        last_use: grows with every use.
    """

    id: str
    tokens: np.ndarray
    parent_id: str | None = None
    is_clients: bool = False
    num_own_tokens: int = 0
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

    def add(
        self,
        context_id: str,
        tokens: np.ndarray,
        parent_id: str | None = None,
        *,
        num_reused: int = 0,
        is_clients: bool = False,
    ) -> None:
        """Makes a context known, as the one used last.

        Args:
            num_reused: first tokens, which the context that it continues has.
        """
        array = np.asarray(tokens, np.int64)
        self._entries[context_id] = CatalogEntry(
            context_id, array, parent_id, is_clients, len(array) - num_reused
        )
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
        nothing is freed as long as it is there.

        Raises:
            KeyError: it is not known.
        """
        self._entries[context_id]
        for each in self.with_parents(context_id):
            self._uses += 1
            self._entries[each].last_use = self._uses

    def with_parents(self, context_id: str | None) -> list[str]:
        """The id and those of what the context continues, as far as they are known."""
        found: list[str] = []
        while context_id in self._entries and context_id not in found:
            found.append(context_id)
            context_id = self._entries[context_id].parent_id
        return found

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
        """The id of the context that shares most first tokens with `tokens`, and how many."""
        entry, length = longest_prefix(self._entries.values(), tokens)
        return None if entry is None else entry.id, length

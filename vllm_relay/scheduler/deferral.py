# SPDX-License-Identifier: Apache-2.0
"""Requests that vLLM could not run when it was their turn."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

R = TypeVar("R", bound=Hashable)


@dataclass
class _Group(Generic[R]):
    scout: R
    behind: dict[R, None] = field(default_factory=dict)


@dataclass
class Deferral(Generic[R]):
    """Of requests that were deferred for the same reason, one tries again, and the others after it.

    vLLM offers every deferred request again in every step. Where many wait for one thing, such as
    the place of a LoRA adapter, that would cost more than all other scheduling.
    """

    _groups: dict[Hashable, _Group[R]] = field(default_factory=dict, init=False)
    _reasons: dict[R, Hashable] = field(default_factory=dict, init=False)  # of those behind

    def __len__(self) -> int:
        return len(self._reasons)

    def __contains__(self, request: R) -> bool:
        return request in self._reasons

    def __iter__(self) -> Iterator[R]:
        return iter(self._reasons)

    def tries_again(self, request: R, reason: Hashable) -> bool:
        """Whether a request that was deferred is the one to try again; if not, it is kept here."""
        group = self._groups.setdefault(reason, _Group(request))
        if group.scout == request:
            return True
        group.behind[request] = None
        self._reasons[request] = reason
        return False

    def release(self, reason: Hashable) -> list[R]:
        """Those that wait for this no longer have to."""
        group = self._groups.pop(reason, None)
        if group is None:
            return []
        for request in group.behind:
            del self._reasons[request]
        return list(group.behind)

    def remove(self, request: R) -> None:
        """Take out a request that is kept here.

        Raises:
            KeyError: it is not.
        """
        del self._groups[self._reasons.pop(request)].behind[request]

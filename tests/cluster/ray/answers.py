# SPDX-License-Identifier: Apache-2.0
"""What a replica's handle gives, made up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

NEVER = object()
"""Comes never."""


class Answer:
    """A stream of these items; exceptions among them are raised."""

    def __init__(self, items: list[Any], cancel: Callable[[], None] = lambda: None) -> None:
        self._items, self.cancel = iter(items), cancel

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        item = next(self._items, StopAsyncIteration())
        if item is NEVER:
            await asyncio.Event().wait()
        if isinstance(item, BaseException):
            raise item
        return item

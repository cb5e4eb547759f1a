# SPDX-License-Identifier: Apache-2.0
"""One who asks the engines for all who look at them, and what each of these has not read yet."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import WeakSet

from vllm_relay.commands.errors import CommandError
from vllm_relay.page.source import Source

logger = logging.getLogger("vllm.relay")

POLL_EVERY_S = 0.5
KEEP_ALIVE_S = 10.0
MAX_VIEWERS = 64
MAX_UNREAD_EVENTS = 64
"""Of a viewer; one that has more of them unread is told all anew."""

Ask = Callable[[str, dict[str, Any]], Awaitable[Mapping[int, Any]]]
"""Runs a command in each engine; a CommandError may be its answer."""


@dataclass(eq=False)
class Event:
    """For viewers; what many are sent is encoded once."""

    kind: str
    data: dict[str, Any]

    @cached_property
    def with_texts(self) -> str:
        return self._encoded(self.data)

    @cached_property
    def without_texts(self) -> str:
        hidden = dict(self.data)
        for name in ("nodes", "added"):
            if name in hidden:
                hidden[name] = [{**node, "text": None} for node in hidden[name]]
        if "changed" in hidden:
            changed = ({k: v for k, v in n.items() if k != "text"} for n in hidden["changed"])
            hidden["changed"] = [node for node in changed if len(node) > 1]
        return self._encoded(hidden)

    def _encoded(self, data: dict[str, Any]) -> str:
        return f"event: {self.kind}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"


@dataclass(eq=False)
class _Viewer:
    texts: bool
    unread: deque[Event] = field(default_factory=deque)
    has_unread: asyncio.Event = field(default_factory=asyncio.Event)
    is_behind: bool = True
    """Whether it has to be told all, before what is unread."""

    def tell(self, event: Event) -> None:
        if self.is_behind:
            return
        if len(self.unread) >= MAX_UNREAD_EVENTS:
            self.fall_behind()
        else:
            self.unread.append(event)
        self.has_unread.set()

    def fall_behind(self) -> None:
        self.is_behind = True
        self.unread.clear()
        self.has_unread.set()


class Viewers:
    """Those of one server.

    Engines are asked while somebody looks, and by one task for all.

    Args:
        make_source: of an engine, by its rank.
        hello: what every viewer is told first, besides the sources.
    """

    def __init__(
        self, ask: Ask, make_source: Callable[[int], Source], hello: Mapping[str, Any]
    ) -> None:
        self._ask = ask
        self._make_source = make_source
        self._hello = hello
        self._name = uuid.uuid4().hex
        self._sources: dict[int, Source] = {}
        self._viewers: WeakSet[_Viewer] = WeakSet()  # their streams keep them, begun or not
        self._num_visits = 0
        """Calls of `source` that have not ended."""
        self._watching: asyncio.Task[None] | None = None
        self._polling = asyncio.Lock()
        self._error: CommandError | None = None

    @asynccontextmanager
    async def source(self, source_id: str) -> AsyncIterator[Source]:
        """A source as it is now, whether anybody looks or not.

        Raises:
            CommandError: 404 there is no such source, or that of an engine.
        """
        self._num_visits += 1
        try:
            while not self._sources or any(each.has_more for each in self._sources.values()):
                await self._poll()
            for source in self._sources.values():
                if source.id == source_id:
                    yield source
                    return
            known = ", ".join(source.id for source in self._sources.values())
            raise CommandError(404, f"source: given {source_id!r}, expected one of {known}")
        finally:
            self._num_visits -= 1
            if not (self._viewers or self._num_visits):
                self._sources.clear()

    async def join(self, texts: bool) -> AsyncIterator[str]:
        """The events of a new viewer, as a server sends them.

        Raises:
            CommandError: 409 there are too many, or that of an engine.
        """
        if len(self._viewers) >= MAX_VIEWERS:
            raise CommandError(409, f"{MAX_VIEWERS} look at this page, the most there can be")
        viewer = _Viewer(texts)
        self._viewers.add(viewer)
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())
        try:
            while not self._sources or self._watching.done():
                if self._watching.done():
                    raise self._error or CommandError(500, "the engine does not answer")
                await asyncio.wait([self._watching], timeout=0.02)
        except BaseException:
            self._viewers.discard(viewer)
            raise
        return self._events(viewer)

    async def _events(self, viewer: _Viewer) -> AsyncIterator[str]:
        try:
            number = 0
            hello = Event("hello", {**self._hello, **self._named(), "texts": viewer.texts})
            yield f"id: {number}\n{hello.with_texts}"
            while viewer in self._viewers or viewer.unread:
                if viewer.is_behind:
                    viewer.is_behind = False
                    sources = self._sources.values()
                    viewer.unread.extend(Event("snapshot", each.snapshot()) for each in sources)
                if not viewer.unread:
                    viewer.has_unread.clear()
                    try:
                        await asyncio.wait_for(viewer.has_unread.wait(), KEEP_ALIVE_S)
                    except asyncio.TimeoutError:
                        yield ": keep-alive\n\n"
                    continue
                event, number = viewer.unread.popleft(), number + 1
                yield f"id: {number}\n{event.with_texts if viewer.texts else event.without_texts}"
        finally:
            self._viewers.discard(viewer)

    async def _watch(self) -> None:
        """Ask until nobody looks."""
        try:
            while self._viewers:
                began_s = time.monotonic()
                await self._poll()
                await asyncio.sleep(max(POLL_EVERY_S - (time.monotonic() - began_s), 0.05))
        except CommandError as error:
            self._error = error
        except Exception as error:
            logger.info("vllm-relay: the live page has ended: %s", error)
            self._error = CommandError(500, f"the engine does not answer: {error}")
        finally:
            for rank in list(self._sources):
                self._drop(rank)
            # their streams end when they have read this; who looks again begins anew
            viewers, self._viewers = self._viewers, WeakSet()
            for viewer in viewers:
                viewer.has_unread.set()

    async def _poll(self) -> None:
        async with self._polling:
            await self._poll_alone()

    async def _poll_alone(self) -> None:
        texts = any(viewer.texts for viewer in self._viewers)
        sources = self._sources.values()
        asked = {each.feed: each.question(texts) for each in sources if each.feed}
        answers = await self._ask("watch_forest", {"watcher": self._name, "asked": asked})
        errors = [each for each in answers.values() if isinstance(each, CommandError)]
        if len(errors) == len(answers):
            raise errors[0]
        for rank, answer in answers.items():
            if isinstance(answer, CommandError):
                self._drop(rank)
                continue
            if rank not in self._sources:
                if not answer["is_full"]:  # to one that was dropped meanwhile
                    continue
                self._sources[rank] = self._make_source(rank)
            event = self._sources[rank].take(answer)
            if event is not None:
                self._tell(Event(*event))

    def _drop(self, rank: int) -> None:
        source = self._sources.pop(rank, None)
        if source is not None:
            self._tell(Event("gone", {"source": source.id}))

    def _tell(self, event: Event) -> None:
        for viewer in self._viewers:
            viewer.tell(event)

    def _named(self) -> dict[str, Any]:
        sources = list(self._sources.values())
        named = [{"id": each.id, "name": each.name} for each in sources]
        return {"block_size_tokens": sources[0].block_size if sources else 0, "sources": named}

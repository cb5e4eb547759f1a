# SPDX-License-Identifier: Apache-2.0
"""Numbered messages of a publisher, each used once and in order, though some are lost.

vLLM numbers batches of KV events from 0, and keeps the last ones for those who ask again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

_ENDPOINT = re.compile(r"(tcp://[^*\s/]+:\d+|ipc://\S+)")


@dataclass(frozen=True)
class EventEndpoints:
    """
    Attributes:
        events: where a publisher sends them.
        replay: where it is asked again; None if nowhere.
    """

    events: str
    replay: str | None = None

    @classmethod
    def of(cls, given: str) -> EventEndpoints:
        """
        Args:
            given: "tcp://host:port", or with a comma and another one for replays.

        Raises:
            ValueError: it is something else.
        """
        parts = given.split(",")
        if len(parts) > 2 or not all(_ENDPOINT.fullmatch(each) for each in parts):
            raise ValueError(
                f"KV events at {given!r} given, expected tcp://HOST:PORT, where the server's "
                f"--kv-events-config says endpoint tcp://*:PORT, or "
                f"tcp://HOST:PORT,tcp://HOST:PORT with that of its replay_endpoint"
            )
        return cls(*parts)


class EventStream:
    """
    Args:
        use: a message.
        forget: what came before no longer counts.
        replay: messages from a number on, as far as the publisher still has them, and their
            numbers, ascending.
        restart: the publisher is gone, or another one.
    """

    def __init__(
        self,
        use: Callable[[bytes], None],
        forget: Callable[[], None],
        replay: Callable[[int], Iterable[tuple[int, bytes]]],
        restart: Callable[[], None],
    ) -> None:
        self._use = use
        self._forget = forget
        self._replay = replay
        self._restart = restart
        self._next = 0
        """Number of the next message to be used."""
        self._next_live = 0
        """And to come, or a later one."""

    def came(self, number: int, message: bytes) -> None:
        """A message came; those that come have ascending numbers, until the publisher restarts."""
        if number < self._next_live:
            self.begin_anew()
        self._next_live = number + 1
        if number > self._next:
            self.catch_up(number)
        if number >= self._next:
            self._go_on(number, message)

    def catch_up(self, until: int | None = None) -> None:
        """Use what the publisher still has from the next message on, to that before a number."""
        begin = -1
        while begin < self._next:
            begin = self._next
            is_whole = self._use_replay(begin)
            if is_whole and until is not None and self._next >= until:
                return

    def _use_replay(self, begin: int) -> bool:
        """Whether there was no gap in it: a publisher drops what it has no room for."""
        for number, message in self._replay(begin):
            if number > self._next > begin:
                return False
            if number >= self._next:
                self._go_on(number, message)
        return True

    def begin_anew(self) -> None:
        """The publisher is gone, or another one."""
        self._restart()
        self._next = self._next_live = 0

    def _go_on(self, number: int, message: bytes) -> None:
        if number > self._next:
            self._forget()
        self._next = number + 1
        self._use(message)

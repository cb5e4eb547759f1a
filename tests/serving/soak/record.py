# SPDX-License-Identifier: Apache-2.0
"""What the clients of a server see, in numbers: answers, turns, waits and memory."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

import psutil

KEPT_PROBLEMS = 20


@dataclass(eq=False)
class Turn:
    """A request until its first token.

    Attributes:
        number: in the order in which requests were sent.
        beside: most requests that were open at once meanwhile.
        ran_before: requests of its priority that had their first token meanwhile.
        overtaken: of these, those that were sent later.
    """

    number: int
    priority: int
    sent_s: float
    beside: int = 0
    ran_before: int = 0
    overtaken: int = 0
    started_s: float | None = None

    @property
    def waited_s(self) -> float:
        assert self.started_s is not None
        return self.started_s - self.sent_s


class Turns:
    """Who gets a first token before whom, as far as clients can tell."""

    def __init__(self) -> None:
        self._waiting: set[Turn] = set()
        self._num_sent = 0
        self._num_open = 0

    def arrive(self, priority: int) -> Turn:
        turn = Turn(self._num_sent, priority, time.monotonic())
        self._num_sent += 1
        self._num_open += 1
        self._waiting.add(turn)
        for each in self._waiting:
            each.beside = max(each.beside, self._num_open)
        return turn

    def start(self, turn: Turn) -> None:
        if turn not in self._waiting:
            return
        turn.started_s = time.monotonic()
        self._waiting.remove(turn)
        for each in self._waiting:
            if each.priority == turn.priority:
                each.ran_before += 1
                each.overtaken += each.number < turn.number

    def leave(self, turn: Turn) -> None:
        self._waiting.discard(turn)
        self._num_open -= 1


@dataclass
class Record:
    """Of one run."""

    turns: Turns = field(default_factory=Turns)
    counts: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    longest_s: dict[str, float] = field(default_factory=dict)
    most: dict[str, int] = field(default_factory=dict)

    def problem(self, kind: str, what: str) -> None:
        """Something that may not be."""
        self.counts[kind] += 1
        if len(self.problems) < KEPT_PROBLEMS:
            self.problems.append(f"{kind}: {what[:700]}")

    def took(self, kind: str, seconds: float) -> None:
        self.longest_s[kind] = max(self.longest_s.get(kind, 0.0), seconds)

    def saw(self, kind: str, number: int) -> None:
        self.most[kind] = max(self.most.get(kind, 0), number)


class Memory:
    """Resident bytes of a server's processes, by the command that each runs."""

    def __init__(self, process_id: int) -> None:
        first = psutil.Process(process_id)
        self._processes = [first, *first.children(recursive=True)]
        self.bytes: list[list[int]] = []

    def look(self) -> None:
        self.bytes.append([each.memory_info().rss for each in self._processes])

    def growth(self) -> list[tuple[float, float]]:
        """MiB of each process: the mean of the middle third of the run, and of the last."""
        third = len(self.bytes) // 3
        middle, last = self.bytes[third : 2 * third], self.bytes[2 * third :]
        return list(zip(_mean_mib(middle), _mean_mib(last), strict=True))

    def tenths(self) -> list[list[float]]:
        """MiB of each process, in each tenth of the run."""
        size = max(1, len(self.bytes) // 10)
        return [_mean_mib(self.bytes[i : i + size]) for i in range(0, len(self.bytes), size)]


def _mean_mib(samples: list[list[int]]) -> list[float]:
    return [round(sum(each) / len(each) / 2**20, 1) for each in zip(*samples, strict=True)]

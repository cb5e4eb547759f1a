# SPDX-License-Identifier: Apache-2.0
"""Each message once and in order, or what came before is forgotten."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_relay.cluster.event_stream import EventEndpoints, EventStream


class Publisher:
    """Keeps the last `kept` messages, and gives no more than `room` of them at a time."""

    def __init__(self, kept: int, room: int) -> None:
        self.kept, self.room = kept, room
        self.sent: list[bytes] = []
        self.life = 0
        self.used: list[bytes] = []
        self.restarts = 0
        self.stream = EventStream(self.used.append, self.used.clear, self.replay, self.restarted)

    def restarted(self) -> None:
        self.restarts += 1
        self.used.clear()

    def replay(self, begin: int) -> Iterator[tuple[int, bytes]]:
        first = max(begin, len(self.sent) - self.kept)
        found = [(number, self.sent[number]) for number in range(first, len(self.sent))]
        # those without room are dropped, later ones are not
        yield from found[: self.room] + found[self.room + 2 :][:1]

    def send(self) -> tuple[int, bytes]:
        self.sent.append(b"%d %d" % (self.life, len(self.sent)))
        return len(self.sent) - 1, self.sent[-1]

    def restart(self) -> None:
        self.sent = []
        self.life += 1


@given(
    st.lists(st.sampled_from(["arrives"] * 4 + ["is lost"] * 2 + ["connects"]), max_size=40),
    st.integers(0, 12),
    st.integers(1, 6),
)
def test_what_is_used_has_no_gap(steps: list[str], kept: int, room: int) -> None:
    publisher = Publisher(kept, room)
    for step in steps:
        if step == "connects":
            publisher.stream.catch_up()
        else:
            number, message = publisher.send()
            if step == "arrives":
                publisher.stream.came(number, message)
                assert publisher.used[-1] == message
        # what is lost shows with the next message, or in a replay if there is one
        is_hidden = step == "is lost" or (step == "connects" and not kept)
        used = publisher.used
        assert used == publisher.sent[len(publisher.sent) - len(used) :] or is_hidden
    publisher.stream.came(*publisher.send())
    used, sent = publisher.used, publisher.sent
    assert used == sent[len(sent) - len(used) :]
    if kept >= len(sent):
        assert used == sent
    assert not publisher.restarts, "a gap is no restart"


@given(st.lists(st.sampled_from(["arrives", "is lost", "late"]), max_size=30), st.integers(0, 5))
def test_what_comes_twice_is_used_once(steps: list[str], kept: int) -> None:
    """Messages that were replayed before they are read."""
    publisher = Publisher(kept, 100)
    unread: list[tuple[int, bytes]] = []
    for step in steps:
        message = publisher.send()
        if step == "late":
            unread.append(message)
        elif step == "arrives":
            for each in [*unread, message]:
                publisher.stream.came(*each)
            unread.clear()
    assert len(set(publisher.used)) == len(publisher.used)
    assert publisher.used == sorted(publisher.used, key=lambda each: int(each.split()[1]))


@pytest.mark.parametrize("kept", [0, 100])
@pytest.mark.parametrize("missed", [0, 1, 3])
def test_of_a_publisher_that_restarts_all_is_forgotten(kept: int, missed: int) -> None:
    publisher = Publisher(kept, 100)
    for _ in range(8):
        publisher.stream.came(*publisher.send())
    publisher.restart()
    for _ in range(missed):
        publisher.send()
    publisher.stream.came(*publisher.send())
    assert publisher.used == (publisher.sent if kept else publisher.sent[-1:])
    assert publisher.restarts == 1


def test_of_a_publisher_that_is_gone_all_is_forgotten() -> None:
    publisher = Publisher(100, 100)
    for _ in range(8):
        publisher.stream.came(*publisher.send())
    publisher.stream.begin_anew()
    assert publisher.used == []
    assert publisher.restarts == 1
    publisher.stream.catch_up()
    assert publisher.used == publisher.sent


def test_endpoints() -> None:
    assert EventEndpoints.of("tcp://a:1") == EventEndpoints("tcp://a:1")
    assert EventEndpoints.of("tcp://a:1,ipc:///b") == EventEndpoints("tcp://a:1", "ipc:///b")


@pytest.mark.parametrize("given", ["", "a:1", "tcp://*:1", "tcp://a", "tcp://a:1,", "tcp://a:1,b"])
def test_other_endpoints_are_refused(given: str) -> None:
    with pytest.raises(ValueError, match="expected tcp://HOST:PORT"):
        EventEndpoints.of(given)

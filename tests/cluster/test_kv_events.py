# SPDX-License-Identifier: Apache-2.0
"""What vLLM's own publisher tells."""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    ZmqEventPublisher,
)

from tests.cluster.test_told_caches import num_held
from tests.support.waiting import WAIT_S, wait_for
from tests.tables.engines.server.fake_server import Reply, answer, fake_server
from tests.tables.engines.server.test_engine import CACHE_METRICS, QUESTION, WordTokenizer
from vllm_relay.cluster.event_stream import EventEndpoints
from vllm_relay.cluster.kv_events import EventTeller, KvEventListener
from vllm_relay.cluster.replica_index import chain_of
from vllm_relay.cluster.told_caches import ToldCaches
from vllm_relay.tables import open_engine
from vllm_relay.tables.engines.base import Prompt

SIZE = 2
PROMPT = [1, 2, 3, 4]


def stored(names: list[Any], tokens: list[int], after: int | None = None, **more: Any) -> Any:
    given = {
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
    }
    return BlockStored(
        block_hashes=names, parent_block_hash=after, token_ids=tokens, **{**given, **more}
    )


def removed(names: list[int], **more: Any) -> Any:
    return BlockRemoved(block_hashes=names, **{"medium": "GPU", "group_idx": 0, **more})


class Publishers:
    """In a folder of their own."""

    def __init__(self, folder: str) -> None:
        self.events, self.replays = f"ipc://{folder}/events", f"ipc://{folder}/replays"
        self._open: list[ZmqEventPublisher] = []

    def start(self, **options: Any) -> ZmqEventPublisher:
        self._open.append(ZmqEventPublisher(0, self.events, self.replays, **options))
        return self._open[-1]

    def stop(self) -> None:
        self._open.pop().shutdown()

    def close(self) -> None:
        while self._open:
            self.stop()


@pytest.fixture
def publishers() -> Iterator[Publishers]:
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        found = Publishers(folder)
        yield found
        found.close()


@contextmanager
def hearing(
    publishers: Publishers, *, replays: bool = True, rank: int | None = None
) -> Iterator[ToldCaches]:
    caches = ToldCaches([100], SIZE)
    endpoints = EventEndpoints(publishers.events, publishers.replays if replays else None)
    listener = KvEventListener(caches, [endpoints], [rank])
    try:
        yield caches
    finally:
        listener.close()
        listener.close()
    assert not any(each.name.startswith("KV events") for each in threading.enumerate())


def publish(publisher: ZmqEventPublisher, *events: Any) -> None:
    publisher.publish(KVEventBatch(ts=0.0, events=list(events)))


def test_who_comes_late_is_told_all(publishers: Publishers) -> None:
    publisher = publishers.start()
    publish(publisher, stored([11, 12], PROMPT))
    with hearing(publishers) as caches:
        wait_for(lambda: num_held(caches, 0, PROMPT) == 2)
        publish(publisher, removed([12]), stored([13], [5, 6], after=11))
        wait_for(lambda: num_held(caches, 0, [1, 2, 5, 6]) == 2)
        assert num_held(caches, 0, PROMPT) == 1
        publish(publisher, AllBlocksCleared())
        wait_for(lambda: not len(caches.held))


def test_a_publisher_that_restarts_begins_with_an_empty_cache(publishers: Publishers) -> None:
    with hearing(publishers) as caches:
        publisher = publishers.start()
        for number in range(5):
            publish(publisher, stored([number], [number, 0]))
        wait_for(lambda: len(caches.held) == 5)
        caches.sent(0, [1])  # that is never told
        publishers.stop()
        wait_for(lambda: not len(caches.held))
        publisher = publishers.start()
        publish(publisher, stored([99], [7, 7]))
        wait_for(lambda: num_held(caches, 0, [7, 7]) == 1)
        assert len(caches.held) == 1


def test_without_replays_what_is_told_from_now_on_counts(publishers: Publishers) -> None:
    publisher = publishers.start()
    publish(publisher, stored([11], [1, 2]))
    with hearing(publishers) as caches:
        wait_for(lambda: len(caches.held) == 1)  # it is sent
    number = 100
    with hearing(publishers, replays=False) as caches:

        def hears() -> bool:
            nonlocal number
            number += 1
            publish(publisher, stored([12], [3, 4], after=11), stored([number], [number, 0]))
            return len(caches.held) > 0

        wait_for(hears)
        assert num_held(caches, 0, PROMPT) == 0


def test_rubbish_is_told_once_and_what_came_before_is_forgotten(
    publishers: Publishers, caplog: pytest.LogCaptureFixture
) -> None:
    with hearing(publishers, replays=False) as caches, zmq.Context() as context:
        publisher = context.socket(zmq.PUB)
        publisher.linger = 0
        publisher.bind(publishers.events)
        number = 0

        def send(*parts: bytes) -> None:
            publisher.send_multipart(parts)

        def send_stored(name: int) -> None:
            nonlocal number
            batch = KVEventBatch(ts=0.0, events=[stored([name], [name, 0])])
            send(b"", number.to_bytes(8, "big"), msgspec.msgpack.encode(batch))
            number += 1

        def hears(name: int) -> bool:
            send_stored(name)
            return num_held(caches, 0, [name, 0]) == 1

        with publisher:
            wait_for(lambda: hears(1))
            mixed = msgspec.msgpack.encode(KVEventBatch(0.0, [stored([1, b"1"], PROMPT)]))
            for rubbish in (
                (b"", number.to_bytes(8, "big"), b"rubbish"),
                (b"", (number + 1).to_bytes(8, "big"), mixed),
                (b"", b"1", b""),
                (b"rubbish",),
                (b"", (1 << 40).to_bytes(8, "big"), msgspec.msgpack.encode({"a": 1})),
            ):
                send(*rubbish)
            number = (1 << 40) + 1
            wait_for(lambda: hears(2))
            assert num_held(caches, 0, [1, 0]) == 0
    about = [each for each in caplog.messages if "KV events at ipc" in each and "left out" in each]
    assert len(about) == 1


def test_who_publishes_nothing_is_named(
    publishers: Publishers, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), hearing(publishers) as caches:
        wait_for(lambda: any("nobody publishes there" in each for each in caplog.messages))
        publish(publishers.start(), stored([1], [1, 2]))
        wait_for(lambda: len(caches.held) == 1)


def test_events_of_another_rank_are_refused(
    publishers: Publishers, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = publishers.start()
    publisher.publish(KVEventBatch(0.0, [stored([1], [1, 2])], data_parallel_rank=3))
    with hearing(publishers, rank=0) as caches:
        wait_for(lambda: any("of rank 3, expected 0" in each for each in caplog.messages))
        assert not len(caches.held)


def test_endpoints_in_the_wrong_order_are_noticed(caplog: pytest.LogCaptureFixture) -> None:
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        endpoints = [
            EventEndpoints(f"ipc://{folder}/{number}", f"ipc://{folder}/replays{number}")
            for number in range(2)
        ]
        publishers = [ZmqEventPublisher(0, each.events, each.replay) for each in endpoints]
        caches = ToldCaches([1000] * 2, SIZE)
        listener = KvEventListener(caches, [endpoints[1], endpoints[0]], [None, None])
        try:
            for turn, publisher in enumerate(publishers):
                publish(publisher, stored([1], [1, 1]))
                wait_for(lambda turn=turn: caches.held.holds(1 - turn, chain_of([1, 1], SIZE)[0]))
            for number in range(2, 100):
                tokens = [number, 0]
                caches.sent(number % 2, chain_of(tokens, SIZE))
                publish(publishers[number % 2], stored([number], tokens))
            last = [chain_of([98 + number, 0], SIZE)[0] for number in range(2)]
            wait_for(lambda: all(caches.held.holds(1 - each, last[each]) for each in range(2)))
        finally:
            listener.close()
            for each in publishers:
                each.shutdown()
    about = sorted(each for each in caplog.messages if "were sent to the server" in each)
    assert len(about) == 2
    for number, message in enumerate(about):
        begin, _, end = message.partition(" they tell ")
        assert f"{folder}/{number}:" in begin and f"{folder}/{1 - number} is given" in end


LEFT_OUT = [
    {"medium": "CPU"},
    {"medium": "STORAGE"},
    {"group_idx": 1},
    {"lora_id": 7},
    {"extra_keys": [("a salt",), None]},
]


@pytest.mark.parametrize("more", LEFT_OUT, ids=str)
def test_other_blocks_do_not_count(more: dict[str, Any]) -> None:
    caches = ToldCaches([100], SIZE)
    teller = EventTeller(caches, 0)
    teller.tell([stored([1], [9, 9]), stored([11, 12], PROMPT, **more)])
    assert num_held(caches, 0, PROMPT) == 0
    teller.tell([stored([11, 12], PROMPT)])
    others = {name: more[name] for name in more if name in ("medium", "group_idx")}
    if others:
        teller.tell([removed([12], **others)])
    assert num_held(caches, 0, PROMPT) == 2


def test_the_first_group_with_full_attention_counts() -> None:
    caches = ToldCaches([100], SIZE)
    teller = EventTeller(caches, 0)
    teller.tell(
        [
            stored([11], [1, 2], kv_cache_spec_kind="sliding_window"),
            stored([11], [1, 2], group_idx=2, kv_cache_spec_kind="full_attention"),
            stored([11], [1, 2], group_idx=3, kv_cache_spec_kind="full_attention"),
            removed([11], group_idx=3),
            removed([11], group_idx=0),
        ]
    )
    assert num_held(caches, 0, PROMPT) == 1
    teller.tell([removed([11], group_idx=2)])
    assert not len(caches.held)


def test_blocks_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="blocks of 4 tokens, expected 2"):
        EventTeller(ToldCaches([9], SIZE), 0).tell([stored([1], PROMPT, block_size=4)])


def test_names_that_cover_tokens_ahead_change_nothing() -> None:
    """With EAGLE and MTP; releases of vLLM that have no such field read over it."""
    fields = msgspec.structs.asdict(stored([11, 12], PROMPT))
    event = {**fields, "type": "BlockStored", "lookahead_token_ids": [[3], [5]]}
    message = msgspec.msgpack.encode([0.0, [event], 0])
    batch = msgspec.msgpack.decode(message, type=KVEventBatch)
    caches = ToldCaches([100], SIZE)
    EventTeller(caches, 0).tell(batch.events)
    assert num_held(caches, 0, PROMPT) == 2


def test_prompts_go_where_their_blocks_are(publishers: Publishers) -> None:
    size = 16
    groups = [[group] * 4 * size for group in range(1, 7)]
    holding, other = publishers.start(), "ipc:///nowhere"
    for group in groups[3:]:
        names = [100 * group[0] + depth for depth in range(4)]
        publish(holding, stored(names, group, block_size=size))
    both_asked = threading.Barrier(2, timeout=WAIT_S)
    waited: set[int] = set()

    def answer_when_both_are_asked(number: int) -> Reply:
        if number not in waited:
            waited.add(number)
            both_asked.wait()
        return answer()

    with (
        fake_server(lambda body: answer_when_both_are_asked(0)) as first,
        fake_server(lambda body: answer_when_both_are_asked(1)) as second,
    ):
        for each in (first, second):
            each.metrics = CACHE_METRICS % 100
        opened: Any = open_engine(
            [first.url, second.url],
            kv_events=[other, f"{publishers.events},{publishers.replays}"],
            tokenizer=WordTokenizer(),
            max_running=1,
        )
        try:
            wait_for(lambda: len(opened._heard.caches.held) == 12)
            asked = [Prompt(number, "", [*groups[number % 6], number]) for number in range(12)]
            found = [each.number for each in opened.generate(iter(asked), QUESTION)]
        finally:
            opened.close()
        assert sorted(found) == list(range(12))
        assert second.prompts[0][0] > 3, "the first that it has asks for what it holds"
        assert first.prompts[0][0] <= 3

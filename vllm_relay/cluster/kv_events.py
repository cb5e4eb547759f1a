# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV events, heard over ZeroMQ: what replicas tell that their caches hold."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from threading import Thread

import msgspec
import zmq
from vllm.distributed.kv_events import (
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    ZmqEventPublisher,
)
from zmq.utils.monitor import recv_monitor_message

from vllm_relay.cluster.event_stream import EventEndpoints, EventStream
from vllm_relay.cluster.told_caches import ToldCaches

logger = logging.getLogger("vllm.relay")

_REPLAY_TIMEOUT_MS = 5000
_NUM_BYTES = 8
_FULL_ATTENTION = {None, "full_attention", "mla_attention", "sink_full_attention"}
_MONITORED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED


class KvEventListener:
    """Hears what replicas tell, in a thread for each, until it is closed.

    A publisher that is away is waited for; once it has gone, the replica's cache is taken for
    empty. Where batches are lost they are asked for again, and where that is not possible, what the
    replica told before is forgotten.

    Args:
        caches: that are told.
        endpoints: of the replicas' publishers.
        ranks: of the replicas in their servers, whose publishers have the next ports; None: the
            endpoints are those of the replicas themselves.
    """

    def __init__(
        self,
        caches: ToldCaches,
        endpoints: Sequence[EventEndpoints],
        ranks: Sequence[int | None],
    ) -> None:
        self.caches = caches
        self._context = zmq.Context()
        replicas = [
            _Replica(caches, number, *each, self._context)
            for number, each in enumerate(zip(endpoints, ranks, strict=True))
        ]
        names = [each.events for each in replicas]
        self._threads = [
            Thread(
                target=each.run, args=(names,), name=f"KV events of replica {number}", daemon=True
            )
            for number, each in enumerate(replicas)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Hear no more; more calls do nothing."""
        self._context.term()  # ends what threads wait for, and waits for their sockets
        for thread in self._threads:
            thread.join()


class EventTeller:
    """Tells caches what the events of one replica say.

    Blocks count that are in the engine's own memory, of the first group of layers with full
    attention, and in no way special to a request (adapters, images, salts).
    """

    def __init__(self, caches: ToldCaches, replica: int) -> None:
        self._caches = caches
        self._replica = replica
        self._group: int | None = None

    def tell(self, events: Iterable[BlockStored | BlockRemoved | AllBlocksCleared]) -> None:
        """
        Raises:
            ValueError: blocks are of another size than those of the caches.
        """
        removed: list[bytes | int] = []
        for event in events:
            if isinstance(event, BlockRemoved):
                if self._counts(event):
                    removed += event.block_hashes
                continue
            if removed:
                self._caches.removed(self._replica, removed)
                removed = []
            if isinstance(event, AllBlocksCleared):
                self._caches.clear(self._replica)
            elif self._counts(event) and event.lora_id is None and not any(event.extra_keys or ()):
                self._caches.stored(
                    self._replica, event.block_hashes, event.parent_block_hash, event.token_ids
                )
        if removed:
            self._caches.removed(self._replica, removed)

    def _counts(self, event: BlockStored | BlockRemoved) -> bool:
        if event.medium not in (None, MEDIUM_GPU):
            return False
        if self._group is None and isinstance(event, BlockStored):
            if event.kv_cache_spec_kind not in _FULL_ATTENTION:
                return False
            if event.block_size != self._caches.block_size_tokens:
                raise ValueError(
                    f"blocks of {event.block_size} tokens, expected "
                    f"{self._caches.block_size_tokens}"
                )
            self._group = event.group_idx
        return event.group_idx == self._group


class _Replica:
    """Hears one publisher."""

    def __init__(
        self,
        caches: ToldCaches,
        number: int,
        endpoints: EventEndpoints,
        rank: int | None,
        context: zmq.Context[zmq.Socket[bytes]],
    ) -> None:
        self._caches = caches
        self._number = number
        self._rank = rank
        self.events = ZmqEventPublisher.offset_endpoint_port(endpoints.events, rank or 0)
        self._replay_from = ZmqEventPublisher.offset_endpoint_port(endpoints.replay, rank or 0)
        self._context = context
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self._teller = EventTeller(caches, number)
        self._stream = EventStream(self._use, self._forget, self._replay, self._restart)
        self._warned: set[str] = set()

    def run(self, endpoints: Sequence[str]) -> None:
        """
        Args:
            endpoints: of all replicas' events.
        """
        self._endpoints = endpoints
        try:
            with self._context.socket(zmq.SUB) as events:
                events.linger = 0
                events.subscribe(b"")
                with events.get_monitor_socket(_MONITORED) as changes:
                    events.connect(self.events)
                    self._hear(events, changes)
        except zmq.ContextTerminated:
            pass

    def _hear(self, events: zmq.Socket[bytes], changes: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(events, zmq.POLLIN)
        poller.register(changes, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if events in ready:
                _, *message = events.recv_multipart()
                if len(message) == 2 and len(message[0]) == _NUM_BYTES:
                    self._stream.came(int.from_bytes(message[0], "big"), message[1])
                else:
                    self._refuse("a message of other parts than a topic, a number and events")
            else:
                # of a publisher that is gone everything was read
                self._changed(recv_monitor_message(changes)["event"])

    def _changed(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._stream.catch_up()
        elif event == zmq.EVENT_DISCONNECTED:
            self._stream.begin_anew()
        else:
            self._warn(
                "nobody publishes there, or no longer; until somebody does, what replicas were "
                "sent is taken for what they hold"
            )

    def _use(self, message: bytes) -> None:
        try:
            batch = self._decoder.decode(message)
            if self._rank is not None and batch.data_parallel_rank not in (None, self._rank):
                raise ValueError(
                    f"events of rank {batch.data_parallel_rank}, expected {self._rank}"
                )
            self._teller.tell(batch.events)
            if (other := self._caches.taken_for(self._number)) is not None:
                self._warn(
                    "they tell of prompts that were sent to the server for which %s is given: give "
                    "endpoints in the order of the servers; until then prompts go to servers that "
                    "do not know them",
                    self._endpoints[other],
                )
        except (ValueError, TypeError) as error:
            self._refuse(str(error))

    def _refuse(self, reason: str) -> None:
        self._warn("not as expected, and left out: %s", reason)
        self._forget()

    def _forget(self) -> None:
        self._caches.forget(self._number)
        self._teller = EventTeller(self._caches, self._number)

    def _restart(self) -> None:
        self._caches.clear(self._number)
        self._teller = EventTeller(self._caches, self._number)

    def _warn(self, message: str, *args: object) -> None:
        """Once of each kind."""
        if message not in self._warned:
            self._warned.add(message)
            logger.warning("vllm-relay: KV events at %s: " + message, self.events, *args)

    def _replay(self, begin: int) -> Iterator[tuple[int, bytes]]:
        if self._replay_from is None:
            return
        with self._context.socket(zmq.DEALER) as asking:
            asking.linger = 0
            asking.rcvhwm = 0  # as much as there is: the publisher drops what has no room
            asking.connect(self._replay_from)
            asking.send_multipart((b"", begin.to_bytes(_NUM_BYTES, "big")))
            while asking.poll(_REPLAY_TIMEOUT_MS):
                *_, number, message = asking.recv_multipart()
                if number == ZmqEventPublisher.END_SEQ:
                    return
                yield int.from_bytes(number, "big"), message
            self._warn("%s does not reply; what was missed is not known", self._replay_from)

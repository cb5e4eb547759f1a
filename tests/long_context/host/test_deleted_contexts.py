# SPDX-License-Identifier: Apache-2.0
"""Contexts that are deleted, or whose store is closed, while a thread stores them."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.sparse.stored_contexts import FINGERPRINT
from tests.support.waiting import WAIT_S, wait_for
from vllm_relay.long_context.host import index_builders, worker_contexts
from vllm_relay.long_context.host.host_sequence import HostSequence, SequencePlace
from vllm_relay.long_context.host.index_builders import start_builders
from vllm_relay.long_context.host.worker_contexts import WorkerContexts
from vllm_relay.long_context.orders import KeptContext
from vllm_relay.sparse.contexts.context_store import MemoryContextStore, context_id_of
from vllm_relay.sparse.plan.options import DBOptions


class PausingStore(MemoryContextStore):
    """Stops when a context is there already and `add` has not returned yet, as it is when its
    training queries are written."""

    def __init__(self) -> None:
        super().__init__()
        self.published, self.may_go_on = threading.Event(), threading.Event()
        self.num_added = 0

    def add(self, tokens: Any, layers: Any, parent: Any = None) -> Any:
        context: Any = SimpleNamespace(
            id=context_id_of(tokens),
            tokens=tokens,
            num_tokens=len(tokens),
            num_bytes=1,
            parent_id=None,
            own_begin=0,
            links=lambda end: [],
        )
        with self._lock:
            self._contexts[context.id] = context
            self.num_added += 1
        self.published.set()
        assert self.may_go_on.wait(WAIT_S)
        return context

    def delete(self, context_id: str) -> None:
        if not self.may_go_on.is_set():
            raise KeyError(context_id)
        super().delete(context_id)


@pytest.fixture
def contexts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WorkerContexts:
    contexts = WorkerContexts(tmp_path, FINGERPRINT, ["layer"], DBOptions(), start_builders(1))
    contexts._store = PausingStore()
    monkeypatch.setattr(worker_contexts, "index_heads", lambda *args: True)
    return contexts


def keep(contexts: WorkerContexts, first_token: int = 0) -> str:
    tokens = list(range(first_token, first_token + 5))
    sequence = HostSequence(SequencePlace(0, len(tokens), 0, 0, len(tokens)))
    sequence.layer("layer", torch.zeros(1, 1, 8))
    kept = KeptContext(f"context {first_token}", tokens)
    contexts.keep(kept, sequence, None)
    return contexts.reports()[-1][0].context_id


def test_a_context_that_is_deleted_while_it_is_written_is_not_seen_any_more(
    contexts: WorkerContexts,
) -> None:
    store: Any = contexts._store
    context_id = keep(contexts)
    assert store.published.wait(WAIT_S)
    contexts.delete(context_id)
    assert contexts.reports() == []
    assert contexts.get(context_id) is None
    store.may_go_on.set()
    wait_for(lambda: contexts.num_queued == 0)
    assert store.contexts() == []


def test_a_context_that_others_store_after_it_was_deleted_is_seen(
    contexts: WorkerContexts,
) -> None:
    store: Any = contexts._store
    store.may_go_on.set()
    context_id = keep(contexts)
    wait_for(lambda: contexts.num_queued == 0)
    [found] = store.contexts()
    contexts.delete(context_id)
    store._contexts[context_id] = found
    assert [report.context_id for report, _ in contexts.reports()] == [context_id]


def test_nothing_is_stored_after_close(contexts: WorkerContexts) -> None:
    store: Any = contexts._store
    keep(contexts)
    assert store.published.wait(WAIT_S)
    keep(contexts, first_token=1)  # is built when the other is stored
    closing = threading.Thread(target=contexts.close)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive(), "close has to wait for what is being written"
    store.may_go_on.set()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    contexts._builders.shutdown(wait=True)
    assert store.num_added == 1


def test_a_context_that_is_deleted_while_it_waits_leaves_its_memory(
    contexts: WorkerContexts,
) -> None:
    store: Any = contexts._store
    keep(contexts)
    assert store.published.wait(WAIT_S)
    context_id = keep(contexts, first_token=1)  # waits for the thread
    waiting = weakref.ref(contexts.get(context_id))
    contexts.delete(context_id)
    gc.collect()
    assert waiting() is None and contexts.num_queued == 2
    store.may_go_on.set()
    wait_for(lambda: contexts.num_queued == 0)
    assert store.num_added == 1


class PausingBuilds:
    """Builds indexes, and stops before one.

    Attributes:
        indexes: that were built.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_before: int) -> None:
        self.indexes: list[weakref.ref[Any]] = []
        self.stops, self.may_go_on = threading.Event(), threading.Event()
        self._num_before, self._build_index = num_before, index_builders.build_index
        monkeypatch.setattr(index_builders, "build_index", self._build)

    def _build(self, *args: Any) -> Any:
        if len(self.indexes) == self._num_before:
            self.stops.set()
            assert self.may_go_on.wait(WAIT_S)
        index, plan = self._build_index(*args)
        self.indexes.append(weakref.ref(index))
        return index, plan


def sequence_of(begin: int, end: int, *names: str) -> HostSequence:
    """The tokens `begin` to `end` of a request, with layers of these names."""
    sequence = HostSequence(SequencePlace(begin, end - begin, 0, 0, end))
    for name in names:
        states = torch.randn(end - begin, 1, 8)
        sequence.layer(name, states).write(begin, states, states)
    return sequence


def test_a_context_that_is_deleted_while_it_is_indexed_leaves_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All but the keys and values of the head that is being built."""
    builds, names = PausingBuilds(monkeypatch, 1), ["first", "second", "third"]
    options = DBOptions(index="flat")
    contexts = WorkerContexts(None, FINGERPRINT, names, options, start_builders(1))
    sequence = sequence_of(0, 5, *names)
    left = [weakref.ref(layer) for layer in sequence.layers.values()]
    contexts.keep(KeptContext("context", list(range(5))), sequence, None)
    del sequence
    assert builds.stops.wait(WAIT_S)
    context_id = context_id_of(np.arange(5))
    left.append(weakref.ref(contexts.get(context_id)))
    contexts.delete(context_id)
    gc.collect()
    still_there = [each() is not None for each in (*left, *builds.indexes)]
    builds.may_go_on.set()
    wait_for(lambda: contexts.num_queued == 0)
    contexts.close()
    assert still_there == [False] * 5
    assert contexts.reports() == []


def test_what_a_deleted_context_continues_leaves_its_memory_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    builds = PausingBuilds(monkeypatch, 1)
    options = DBOptions(index="flat")
    contexts = WorkerContexts(None, FINGERPRINT, ["layer"], options, start_builders(1))
    parent_id, child_id = (context_id_of(np.arange(each)) for each in (300, 310))
    contexts.keep(KeptContext(parent_id, list(range(300))), sequence_of(0, 300, "layer"), None)
    wait_for(lambda: contexts.num_queued == 0)
    parent = weakref.ref(contexts.get(parent_id))
    child = sequence_of(300, 310, "layer")
    contexts.keep(KeptContext(child_id, list(range(310))), child, parent())
    del child
    assert builds.stops.wait(WAIT_S)
    contexts.delete(parent_id)
    gc.collect()
    continued = parent() is not None
    contexts.delete(child_id)
    gc.collect()
    still_there = parent() is not None
    builds.may_go_on.set()
    wait_for(lambda: contexts.num_queued == 0)
    contexts.close()
    assert (continued, still_there) == (True, False)

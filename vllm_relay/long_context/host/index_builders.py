# SPDX-License-Identifier: Apache-2.0
"""The threads that build indexes of contexts beside the steps of the engine, and what they do."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, thread
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil

from vllm_relay.long_context.host.sequence_context import SequenceContext
from vllm_relay.sparse.contexts.context_store import HeadStates, Parent
from vllm_relay.sparse.index.elements import check_finite
from vllm_relay.sparse.index.flat import FlatIndex
from vllm_relay.sparse.plan.index_choice import build_index
from vllm_relay.sparse.plan.options import DBOptions
from vllm_relay.sparse.plan.search_cost import SearchCost

logger = logging.getLogger("vllm.relay")

_BUILDER_NICENESS = 10


def start_builders(threads: int) -> ThreadPoolExecutor:
    """Each builds the indexes of one context at a time; others wait."""
    return ThreadPoolExecutor(threads, "relay-index", initializer=_be_nice)


def process_ends() -> bool:
    """Python waits for the threads of all executors when it ends, whatever they still have to do:
    builders ask, and stop."""
    state: Any = thread
    return bool(getattr(state, "_shutdown", False))


def _be_nice() -> None:
    """Builders leave the cores to the steps of the engine, and use all of them: vLLM binds the
    thread that starts them to one core. On Linux, threads have priorities and cores of their own.
    """
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BUILDER_NICENESS)
        threads = psutil.Process().threads()
        cores = set().union(*(os.sched_getaffinity(thread.id) for thread in threads))
        os.sched_setaffinity(0, cores)
    except (OSError, psutil.Error):
        logger.debug("index builders run at normal priority", exc_info=True)


class UnusableStatesError(ValueError):
    """A key or value that no index can have: NaN, infinite, or too large."""


@dataclass(eq=False)
class Build:
    """A request that became a context, until that is stored.

    Its thread keeps nothing of it while it builds an index but the states of that head's layer, so
    that what is deleted or refused leaves its memory then.

    Attributes:
        lock: held where `context`, `parent` and `heads` change.
        context: None as soon as it is deleted or refused.
        parent: in the store, what it will continue.
        heads: of each layer, what is built so far, behind the parent's tokens.
        problem: why it stays in memory, or is refused.
    """

    context_id: str
    tokens: np.ndarray
    lock: threading.Lock
    context: SequenceContext | None
    parent: Parent | None = None
    heads: list[list[HeadStates]] = field(default_factory=list)
    problem: str | None = None
    future: Future[None] | None = None

    def let_go(self) -> None:
        """Nobody wants it any more; the lock is held."""
        self.context, self.parent, self.heads = None, None, []


def index_heads(
    build: Build,
    begin: int,
    options: DBOptions,
    costs: SearchCost,
    goes_on: Callable[[], bool],
) -> bool:
    """Builds the `heads` of a context, of its tokens from `begin` on.

    Returns:
        False: nobody wants it any more.

    Raises:
        UnusableStatesError: no index can have its keys or values.
    """
    context = build.context
    if context is None:
        return False
    num_layers, num_kv_heads = context.shape.num_layers, context.shape.num_kv_heads
    del context
    for layer in range(num_layers):
        with build.lock:
            build.heads.append([])
        for head in range(num_kv_heads):
            if not goes_on() or process_ends():
                return False
            try:
                if not _index_head(build, layer, head, begin, options, costs):
                    return False
            except ValueError as error:
                raise UnusableStatesError(f"layer {layer}, kv head {head}: {error}") from error
        _take_flat(build, layer, begin)
    return True


def _index_head(
    build: Build, layer: int, head: int, begin: int, options: DBOptions, costs: SearchCost
) -> bool:
    context = build.context
    if context is None:
        return False
    keys, values = context.rows(layer, head, begin, context.num_tokens)
    train = context.queries(layer, head, begin, context.num_tokens)
    group, last = context.group_size(layer), context.last_queries(layer, head)
    del context
    check_finite("keys", keys)
    check_finite("values", values)
    index, plan = build_index(layer, keys, values, train, group, options, costs, last)
    with build.lock:
        if build.context is None:
            return False
        build.heads[-1].append(HeadStates(keys, values, index, train, plan))
    return True


def _take_flat(build: Build, layer: int, begin: int) -> None:
    """Readers use the layer's indexes at once where all are flat and of its own tokens."""
    with build.lock:
        context, heads = build.context, build.heads[-1:]
    if context is None or begin != context.own_begin:
        return
    flat = [each.index for each in heads[0] if isinstance(each.index, FlatIndex)]
    if len(flat) == len(heads[0]):
        context.take_flat(layer, flat)

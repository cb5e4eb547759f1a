# SPDX-License-Identifier: Apache-2.0
"""What stands beside the scheduler of an engine core, and what it is told."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from vllm_relay.vllm_changes.wrap import wrap


class Companion(Protocol):
    """What stands beside a scheduler."""

    def take_orders(self) -> Any:
        """What workers are told with the step that was just scheduled; falsy: nothing."""

    def before_free(self, request: Any) -> None:
        """The blocks of a request are given back: it has ended or was preempted."""

    def forget_preempted(self) -> None:
        """The prefix cache was reset."""


def call_before_scheduler(prepare: Callable[[], None]) -> None:
    """Call ``prepare()`` in an engine core before it has a scheduler.

    Reason: what only engine cores need is changed in no other process, which would have to import
    it. EngineCore asks for its scheduler class first of all.
    Remove when: vLLM calls plugins when an engine core starts.
    """
    from vllm.config import SchedulerConfig

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_scheduler_cls(self: Any, *args: Any, **kwargs: Any) -> Any:
            prepare()
            return original(self, *args, **kwargs)

        return get_scheduler_cls

    wrap(SchedulerConfig, "get_scheduler_cls", make)


def keep_beside_scheduler(
    name: str, make_companion: Callable[[Any], Companion | None], orders_attribute: str
) -> None:
    """Give schedulers ``make_companion(scheduler)`` as attribute ``name``, and send its orders to
    the workers in an attribute of SchedulerOutput.

    Reason: which tokens of a request the host has decides where it starts, what a preemption costs
    and who is admitted, and a KV connector would bring tokens back to the device for that.
    Remove when: KV cache managers of plug-ins can count tokens as computed that have no blocks,
    are told of preemptions, and SchedulerOutput carries data of plug-ins.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    def make_init(original: Callable[..., Any]) -> Callable[..., Any]:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            setattr(self, name, make_companion(self))

        return __init__

    def make_schedule(original: Callable[..., Any]) -> Callable[..., Any]:
        def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
            scheduler_output = original(self, *args, **kwargs)
            companion = getattr(self, name)
            if companion is not None and (orders := companion.take_orders()):
                setattr(scheduler_output, orders_attribute, orders)
            return scheduler_output

        return schedule

    def make_free(original: Callable[..., Any]) -> Callable[..., Any]:
        def _free_request_blocks(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            companion = getattr(self, name)
            if companion is not None:
                companion.before_free(request)
            return original(self, request, *args, **kwargs)

        return _free_request_blocks

    def make_reset(original: Callable[..., Any]) -> Callable[..., Any]:
        def reset_prefix_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
            done = original(self, *args, **kwargs)
            companion = getattr(self, name)
            if companion is not None:
                companion.forget_preempted()
            return done

        return reset_prefix_cache

    wrap(Scheduler, "__init__", make_init)
    wrap(Scheduler, "schedule", make_schedule)
    wrap(Scheduler, "_free_request_blocks", make_free)
    wrap(Scheduler, "reset_prefix_cache", make_reset)


def report_admissions(kv_cache_manager: Any, on_admitted: Callable[[Any, int], None]) -> None:
    """Call ``on_admitted(request, hit_tokens)`` when a request has been admitted.

    Reason: KVCacheManager sums hits up over all requests of a step, so it does not say which
    prefixes are hit, and counts nothing where statistics are disabled.
    Remove when: vLLM's prefix cache statistics name prefixes.
    """

    original = kv_cache_manager.record_prefix_cache_stats

    def record_prefix_cache_stats(request: Any, num_hits: int, *args: Any, **kwargs: Any) -> Any:
        if kv_cache_manager.prefix_cache_lookup_enabled(request):
            on_admitted(request, num_hits)
        return original(request, num_hits, *args, **kwargs)

    kv_cache_manager.record_prefix_cache_stats = record_prefix_cache_stats


@contextlib.contextmanager
def answer_for_connector(
    connector: Any, answers: Mapping[tuple[str, int], tuple[int | None, bool]]
) -> Iterator[None]:
    """Do not ask a KV connector again, in this context, what it has told about a request, given as
    its id and the number of tokens that are there.

    Reason: the order of requests depends on what connectors can load for them, Scheduler asks when
    it admits one, and a look-up may go over the network.
    Remove when: Scheduler keeps what connectors have answered.
    """
    name = "get_num_new_matched_tokens"
    original = getattr(connector, name)
    own = {name: original} if name in vars(connector) else {}

    def get_num_new_matched_tokens(
        request: Any, num_tokens: int, *args: Any, **kwargs: Any
    ) -> tuple[int | None, bool]:
        answer = None if args or kwargs else answers.get((request.request_id, num_tokens))
        return answer or original(request, num_tokens, *args, **kwargs)

    setattr(connector, name, get_num_new_matched_tokens)
    try:
        yield
    finally:
        del vars(connector)[name]
        vars(connector).update(own)


@contextlib.contextmanager
def free_block_queue(make_queue: Callable[[list[Any]], Any]) -> Iterator[None]:
    """Let the block pools built in this context keep their free blocks in ``make_queue(blocks)``.

    Reason: BlockPool builds its FreeKVCacheBlockQueue itself, and which block is evicted is decided
    there.
    Remove when: vLLM has a registry of eviction policies for the prefix cache.
    """
    from vllm.v1.core import block_pool

    original = block_pool.FreeKVCacheBlockQueue
    block_pool.FreeKVCacheBlockQueue = make_queue
    try:
        yield
    finally:
        block_pool.FreeKVCacheBlockQueue = original

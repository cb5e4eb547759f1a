# SPDX-License-Identifier: Apache-2.0
"""What happens to the KV blocks of a scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from vllm_relay.vllm_changes.scheduler import report_admissions
from vllm_relay.vllm_changes.wrap import wrap

_MARK = "_seen_by_vllm_relay"


class BlockObserver(Protocol):
    """Is told what happens to KV blocks, by their ids."""

    def on_cached(
        self, request: Any, blocks: Sequence[Any], block_hashes: Sequence[bytes], first: int
    ) -> None:
        """Blocks of KV cache group `group` can be found now.

        Args:
            blocks: of the request, from its block number `first` on.
            block_hashes: of these, and before them that of the block before, if there is one.
        """

    def on_cached_elsewhere(self, blocks: Iterable[Any]) -> None:
        """Blocks of another KV cache group can be found now."""

    def on_taken(self, blocks: Iterable[Any]) -> None:
        """Blocks have left the queue of free ones for new content: they can be found no more."""

    def on_evicted(self, block_ids: Iterable[int]) -> None:
        """Blocks can be found no more, wherever they are."""

    def on_reset(self) -> None:
        """No block can be found any more."""

    def on_admitted(self, request: Any, hit_tokens: int) -> None: ...

    def before_free(self, request: Any) -> None:
        """The blocks of a request are given back: it has ended or was preempted."""


def call_with_new_schedulers(call: Callable[[Any], None]) -> None:
    """Call ``call(scheduler)`` when vLLM's part of a scheduler is complete.

    Reason: what observes a scheduler has to be there before its first request.
    Remove when: vLLM calls plugins when an engine core has a scheduler.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            call(self)

        return __init__

    wrap(Scheduler, "__init__", make, _MARK)


def report_blocks(scheduler: Any, observer: BlockObserver, group: int) -> None:
    """Tell an observer of all that happens to the KV blocks of this scheduler, and of no other.

    Args:
        group: the KV cache group whose blocks are told with their hashes.

    Reason: KV events name blocks by hashes that are not those of the scheduler, cost more than what
    they tell, say nothing of requests, and go to a socket.
    Remove when: BlockPool has listeners.
    """
    from vllm.v1.core.kv_cache_utils import resolve_block_hashes

    pool = scheduler.kv_cache_manager.block_pool
    cache_full_blocks, get_new_blocks = pool.cache_full_blocks, pool.get_new_blocks
    evict_blocks, reset_prefix_cache = pool.evict_blocks, pool.reset_prefix_cache
    free_request_blocks = scheduler._free_request_blocks

    def cache_and_tell(
        request: Any,
        blocks: Sequence[Any],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        done = cache_full_blocks(
            request,
            blocks,
            num_cached_blocks,
            num_full_blocks,
            block_size,
            kv_cache_group_id,
            *args,
            **kwargs,
        )
        new = blocks[num_cached_blocks:num_full_blocks]
        if not new:
            return done
        if kv_cache_group_id != group:
            observer.on_cached_elsewhere(new)
            return done
        hashes = resolve_block_hashes(request.block_hashes, pool.hash_block_size, block_size)
        first = max(num_cached_blocks - 1, 0)
        observer.on_cached(request, new, hashes[first:num_full_blocks], num_cached_blocks)
        return done

    def take_and_tell(*args: Any, **kwargs: Any) -> Any:
        blocks = get_new_blocks(*args, **kwargs)
        observer.on_taken(blocks)
        return blocks

    def evict_and_tell(block_ids: set[int], *args: Any, **kwargs: Any) -> Any:
        done = evict_blocks(block_ids, *args, **kwargs)
        observer.on_evicted(block_ids)
        return done

    def reset_and_tell(*args: Any, **kwargs: Any) -> Any:
        done = reset_prefix_cache(*args, **kwargs)
        if done:
            observer.on_reset()
        return done

    def free_and_tell(request: Any, *args: Any, **kwargs: Any) -> Any:
        observer.before_free(request)
        return free_request_blocks(request, *args, **kwargs)

    pool.cache_full_blocks, pool.get_new_blocks = cache_and_tell, take_and_tell
    pool.evict_blocks, pool.reset_prefix_cache = evict_and_tell, reset_and_tell
    scheduler._free_request_blocks = free_and_tell
    report_admissions(scheduler.kv_cache_manager, observer.on_admitted)

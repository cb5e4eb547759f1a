# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of long contexts: hooks into vLLM's KV cache manager.

A request whose first tokens are in host memory starts behind them: its block table names the null
block for them, which nobody reads, and a block of its own for what is left of the last one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.request import Request, RequestStatus

from vllm_relay.config import RelayConfig
from vllm_relay.long_context.orders import (
    COUNTERS,
    GAUGES,
    LONG_CONTEXTS,
    LongContextStats,
    Placement,
    StepOrders,
)
from vllm_relay.long_context.scheduling.catalog import ContextCatalog
from vllm_relay.long_context.scheduling.host_memory import HostMemory, Reused
from vllm_relay.long_context.scheduling.kept_contexts import (
    KeptContexts,
    is_kept,
    is_known_by_tokens,
)
from vllm_relay.long_context.scheduling.kv_cache_spec import (
    RelaySparseManager,
    host_bytes_per_token,
)
from vllm_relay.long_context.scheduling.memory import capacity_bytes, check_capacity


class HostBlocks(KVCacheBlocks):
    """Null blocks that stand for tokens in host memory."""

    num_tokens: int
    context_id: str | None


class LongContextScheduler:
    """Beside one vLLM scheduler, whose KV cache manager asks it. Raises ValueError: no layer's
    tokens can leave the device, or the host memory is more than there is, or does not suffice for
    the longest request."""

    def __init__(self, scheduler: Any) -> None:
        options = RelayConfig.from_vllm_config(scheduler.vllm_config)
        self._manager = manager = scheduler.kv_cache_manager
        num_ranks = scheduler.vllm_config.parallel_config.tensor_parallel_size
        self._max_model_len = scheduler.max_model_len
        self._block_managers = [
            each
            for each in manager.coordinator.single_type_managers
            if isinstance(each, RelaySparseManager)
        ]
        if not self._block_managers:
            raise ValueError(
                "RELAY_SPARSE was selected for a model without a layer of full attention, whose "
                "tokens could leave the device: use --attention-backend relay"
            )
        # with other KV cache groups, tokens that their layers need are not in host memory
        self._can_skip_tokens = (
            len(manager.coordinator.single_type_managers) == 1 and manager.enable_caching
        )
        catalog = ContextCatalog()
        self.memory = HostMemory(
            capacity_bytes(options.host_memory_gib),
            host_bytes_per_token(manager.kv_cache_config) * num_ranks,
            catalog,
        )
        check_capacity(self.memory, self._max_model_len)
        self._policy = self._block_managers[0].kv_cache_spec.policy
        no_contexts = (
            "contexts are kept only with prefix caching, and of models whose layers all have full "
            "attention"
        )
        self.contexts = KeptContexts(
            options,
            catalog,
            self.memory,
            num_ranks=num_ranks,
            problem=None if self._can_skip_tokens else no_contexts,
            min_tokens=self._policy.min_context_tokens,
            max_model_len=self._max_model_len,
        )
        self._token_ids: WeakKeyDictionary[Request, np.ndarray] = WeakKeyDictionary()
        self._has_folder = options.context_dir is not None
        self._preempted: dict[str, int] = {}  # request -> tokens in host memory
        self._num_kept_tokens = 0
        self._block_bytes = sum(
            len(group.layer_names) * group.kv_cache_spec.page_size_bytes
            for group in manager.kv_cache_config.kv_cache_groups
        ) // len(manager.kv_cache_config.kv_cache_groups)
        self._orders = StepOrders()
        self._get_computed_blocks = manager.get_computed_blocks
        self._allocate_slots = manager.allocate_slots
        manager.get_computed_blocks = self.get_computed_blocks
        manager.allocate_slots = self.allocate_slots

    def get_computed_blocks(
        self, request: Request, *args: Any, **kwargs: Any
    ) -> tuple[KVCacheBlocks, int, int]:
        """As KVCacheManager's; the host's tokens count as computed if there are more of them."""
        blocks, num_tokens, boundary = self._get_computed_blocks(request, *args, **kwargs)
        placement = self._placement(request)
        if placement is None or placement.num_tokens <= num_tokens:
            return blocks, num_tokens, boundary
        if placement.num_tokens > _longest_hit_tokens(request, *args, **kwargs):
            return blocks, num_tokens, boundary
        num_null = placement.first_resident_token // self._policy.block_size_tokens
        host_blocks = HostBlocks(([self._manager.block_pool.null_block] * num_null,))
        host_blocks.num_tokens = placement.num_tokens
        host_blocks.context_id = placement.context_id
        return host_blocks, placement.num_tokens, 0

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> KVCacheBlocks | None:
        """As KVCacheManager's; None also if there is no host memory for the tokens of the step."""
        num_tokens = request.num_computed_tokens + num_new_computed_tokens + num_new_tokens
        request_id = request.request_id
        asked = request, num_new_tokens, num_new_computed_tokens, new_computed_blocks
        is_mirrored = self._policy.mirrors(num_tokens, request.num_prompt_tokens)
        if not is_mirrored and request_id not in self._preempted:
            # short requests must not cost anything: there are many of them in every step
            return self._allocate_slots(*asked, *args, **kwargs)
        reused = self._reused(request_id, new_computed_blocks)
        if is_mirrored and not self._reserve(request_id, num_tokens, reused):
            return None
        if not isinstance(new_computed_blocks, HostBlocks):
            allocated = self._allocate_slots(*asked, *args, **kwargs)
            self._settle(request, allocated is not None, reused)
            return allocated
        size = self._policy.block_size_tokens
        first_resident = new_computed_blocks.num_tokens // size * size
        for each in self._block_managers:
            each.first_resident_tokens[request_id] = first_resident
        # the last block is not full: vLLM gets it a block, as if a KV connector were to fill it
        kwargs["num_external_computed_tokens"] = new_computed_blocks.num_tokens - first_resident
        allocated = self._allocate_slots(
            request, num_new_tokens, first_resident, new_computed_blocks, *args, **kwargs
        )
        self._settle(request, allocated is not None, reused)
        if allocated is None:
            for each in self._block_managers:
                each.first_resident_tokens.pop(request_id, None)
            return None
        context_id = new_computed_blocks.context_id
        if context_id is not None:
            self.contexts.catalog.use(context_id)
        else:
            self._num_kept_tokens += new_computed_blocks.num_tokens
        self._orders.placed[request_id] = Placement(
            new_computed_blocks.num_tokens, first_resident, context_id
        )
        return allocated

    def _reused(self, request_id: str, new_computed_blocks: KVCacheBlocks | None) -> Reused | None:
        """What a request has of a context: one that runs, or begins with these blocks."""
        if new_computed_blocks is None:
            return self.memory.reused(request_id)
        if not isinstance(new_computed_blocks, HostBlocks):
            return None
        if new_computed_blocks.context_id is None:  # it was preempted, and goes on
            return self.memory.reused(request_id)
        return Reused(new_computed_blocks.context_id, new_computed_blocks.num_tokens)

    def _settle(self, request: Request, has_blocks: bool, reused: Reused | None) -> None:
        """What was reserved for a request that stays in the queue is free for those that run."""
        if has_blocks:
            self._preempted.pop(request.request_id, None)
            if reused != self.memory.reused(request.request_id):
                self.memory.reuse(request.request_id, reused)
        elif request.request_id in self._preempted:
            self.memory.preempt(request.request_id)
        elif request.status != RequestStatus.RUNNING:
            self.memory.release(request.request_id)

    def before_free(self, request: Request) -> None:
        """The request gives its blocks back: it has ended, or is preempted."""
        request_id = request.request_id
        num_tokens = request.num_computed_tokens - request.num_in_flight_tokens
        if request.status != RequestStatus.RUNNING:
            self._preempted.pop(request_id, None)
            if is_kept(request):
                self.contexts.keep(request, num_tokens)
            self.memory.release(request_id)
        elif self._can_skip_tokens and self._policy.mirrors(num_tokens, request.num_prompt_tokens):
            self._preempted[request_id] = num_tokens
            self.memory.preempt(request_id)
        elif self.memory.holds(request_id):
            self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        """What the host has of a preempted request is of no use any more."""
        self.memory.release(request_id)
        self._preempted.pop(request_id, None)
        self._orders.dropped.append(request_id)

    def restart(self, scheduler: Any, lost: Mapping[str, str]) -> None:
        """Lets requests begin again whose context cannot be read; it is not used any more.

        Args:
            lost: request -> context.
        """
        for request_id, context_id in lost.items():
            request = scheduler.requests.get(request_id)
            if request is None:  # it could not be kept by all ranks
                self.contexts.evict(context_id)
                continue
            self.contexts.delete(context_id)
            if request.status != RequestStatus.RUNNING:
                continue
            scheduler.running.remove(request)
            # vLLM has hashed the blocks when it scheduled them
            block_ids = {each for ids in self._manager.get_block_ids(request_id) for each in ids}
            self._manager.evict_blocks(block_ids - {self._manager.block_pool.null_block.block_id})
            # what the step has computed is dropped, as for a reset of the prefix cache
            scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
            self._drop(request_id)

    def forget_preempted(self) -> None:
        """What preempted requests have computed is of no use any more: weights may have changed."""
        for request_id in list(self._preempted):
            self._drop(request_id)

    def numbers(self, counted: LongContextStats) -> dict[str, Any]:
        """The metrics of `stats`, under their key: what workers have counted, and what is here."""
        numbers = {name: getattr(counted, name, 0) for name in (*COUNTERS, *GAUGES)}
        numbers |= {"preempted_kept_tokens": self._num_kept_tokens, **self.gauges()}
        self._num_kept_tokens = 0
        return {LONG_CONTEXTS: numbers}

    def gauges(self) -> dict[str, int]:
        """What is here, as it is now."""
        pool = self._manager.block_pool
        num_held = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()  # without the null block
        return {
            "host_kv_bytes": self.memory.used_bytes,
            "host_kv_limit_bytes": self.memory.capacity_bytes,
            "device_kv_bytes": num_held * self._block_bytes,
            "contexts": len(self.contexts.catalog),
            "context_file_bytes": self.contexts.catalog.file_bytes,
        }

    def take_orders(self) -> StepOrders:
        """What has to be said to the workers with the step that was just scheduled."""
        orders, self._orders = self._orders, StepOrders()
        orders.kept = self.contexts.take_pending()
        orders.deleted = self.contexts.take_evicted()
        return orders

    def _placement(self, request: Request) -> Placement | None:
        size = self._policy.block_size_tokens
        least, most = max(self._policy.min_context_tokens, size), request.num_tokens - 1
        if most < least or not self._can_skip_tokens:
            return None
        num_tokens = self._preempted.get(request.request_id, 0)
        context_id = None
        may_reuse = len(self.contexts.catalog) and self._manager.prefix_cache_lookup_enabled(
            request
        )
        if num_tokens == 0 and may_reuse and is_known_by_tokens(request):
            # kept: a waiting request is looked at in each step, and 131,072 tokens take 8 ms
            tokens = self._token_ids.get(request)
            if tokens is None or len(tokens) != request.num_tokens:
                tokens = self._token_ids[request] = np.asarray(request.all_token_ids, np.int64)
            context_id, num_tokens = self.contexts.catalog.longest_prefix(tokens)
        # the logits of the last token have to be computed
        num_tokens = min(num_tokens, most)
        if num_tokens < least:
            return None
        return Placement(num_tokens, num_tokens // size * size, context_id)

    def _reserve(self, request_id: str, num_tokens: int, reused: Reused | None) -> bool:
        """Makes room for the first tokens of a request, behind what it reuses."""
        num_tokens = min(num_tokens, self._max_model_len)
        num_own_tokens = num_tokens - (0 if reused is None else reused.num_tokens)
        dropped = self.memory.reserve(request_id, num_own_tokens)
        if dropped is None and self._evict_for(request_id, num_own_tokens, reused):
            dropped = self.memory.reserve(request_id, num_own_tokens)
        if dropped is None:
            return False
        for other in dropped:
            self._preempted.pop(other, None)
        self._orders.dropped += dropped
        return True

    def _evict_for(self, request_id: str, num_tokens: int, reused: Reused | None) -> bool:
        """Whether there is room when contexts in memory leave, those of clients first.

        Where nobody runs whose end would make room, none may keep a request waiting: not even the
        one that it reuses, without which it then begins again.
        """
        is_alone = self.memory.is_alone(request_id)
        contexts = self.contexts.catalog.in_leaving_order()
        if self._has_folder and not is_alone:
            contexts = []  # they are being written, and take no memory soon
        if reused is not None:
            contexts = [each for each in contexts if each.id != reused.context_id]
        leaving = self.memory.contexts_in_the_way(request_id, num_tokens, contexts)
        for each in leaving:
            self.contexts.evict(each.id)
        if is_alone and not leaving:
            if reused is not None and reused.context_id in self.contexts.catalog:
                self.contexts.evict(reused.context_id)
            if request_id in self._preempted:
                self._drop(request_id)
        return bool(leaving)


def _longest_hit_tokens(
    request: Request, max_cache_hit_length: int | None = None, *args: Any, **kwargs: Any
) -> int:
    """What KVCacheManager.get_computed_blocks may find; from 0.33 on its caller can bound it."""
    return request.num_tokens if max_cache_hit_length is None else max_cache_hit_length

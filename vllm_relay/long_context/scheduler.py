# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of long contexts: hooks into vLLM's KV cache manager.

A request whose first tokens are in host memory starts behind them: its block table names the null
block for them, which nobody reads, and a block of its own for what is left of the last one.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request, RequestStatus

from vllm_relay.config import RelayConfig
from vllm_relay.long_context.host_memory import HostMemory
from vllm_relay.long_context.kv_cache_spec import RelaySparseManager, RelaySparseSpec
from vllm_relay.long_context.memory import default_capacity_bytes
from vllm_relay.long_context.orders import Placement, StepOrders


class HostBlocks(KVCacheBlocks):
    """Null blocks that stand for tokens in host memory."""

    num_tokens: int
    context_id: str | None


class LongContextScheduler:
    """Beside one vLLM scheduler, whose KV cache manager asks it.

    Raises:
        ValueError: the host memory does not suffice for the longest request.
    """

    def __init__(self, scheduler: Any) -> None:
        options = RelayConfig.from_vllm_config(scheduler.vllm_config)
        self._manager = manager = scheduler.kv_cache_manager
        self._max_model_len = scheduler.max_model_len
        self._block_managers = [
            each
            for each in manager.coordinator.single_type_managers
            if isinstance(each, RelaySparseManager)
        ]
        # with other KV cache groups, tokens that their layers need are not in host memory
        self._can_skip_tokens = (
            len(manager.coordinator.single_type_managers) == 1 and manager.enable_caching
        )
        self.memory = HostMemory(
            _capacity_bytes(options.host_memory_gib),
            _bytes_per_token(
                manager.kv_cache_config,
                scheduler.vllm_config.parallel_config.tensor_parallel_size,
            ),
        )
        self._check_capacity()
        self._preempted: dict[str, int] = {}  # request -> tokens in host memory
        self._orders = StepOrders()
        if self._block_managers:
            self._policy = self._block_managers[0].kv_cache_spec.policy
            self._get_computed_blocks = manager.get_computed_blocks
            self._allocate_slots = manager.allocate_slots
            manager.get_computed_blocks = self.get_computed_blocks
            manager.allocate_slots = self.allocate_slots

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int, int]:
        """As KVCacheManager's; the host's tokens count as computed if there are more of them."""
        blocks, num_tokens, boundary = self._get_computed_blocks(request)
        placement = self._placement(request)
        if placement is None or placement.num_tokens <= num_tokens:
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
        **kwargs: Any,
    ) -> KVCacheBlocks | None:
        """As KVCacheManager's; None also if there is no host memory for the tokens of the step."""
        num_tokens = request.num_computed_tokens + num_new_computed_tokens + num_new_tokens
        if not self._reserve(request, num_tokens):
            return None
        if not isinstance(new_computed_blocks, HostBlocks):
            allocated = self._allocate_slots(
                request, num_new_tokens, num_new_computed_tokens, new_computed_blocks, **kwargs
            )
            if allocated is not None:
                self._preempted.pop(request.request_id, None)
            return allocated
        size = self._policy.block_size_tokens
        first_resident = new_computed_blocks.num_tokens // size * size
        for each in self._block_managers:
            each.first_resident_tokens[request.request_id] = first_resident
        # the last block is not full: vLLM gets it a block, as if a KV connector were to fill it
        kwargs["num_external_computed_tokens"] = new_computed_blocks.num_tokens - first_resident
        allocated = self._allocate_slots(
            request, num_new_tokens, first_resident, new_computed_blocks, **kwargs
        )
        if allocated is None:
            for each in self._block_managers:
                each.first_resident_tokens.pop(request.request_id, None)
            return None
        self._preempted.pop(request.request_id, None)
        self._orders.placed[request.request_id] = Placement(
            new_computed_blocks.num_tokens, first_resident, new_computed_blocks.context_id
        )
        return allocated

    def before_free(self, request: Request) -> None:
        """The request gives its blocks back: it has ended, or is preempted."""
        request_id = request.request_id
        num_tokens = request.num_computed_tokens - request.num_in_flight_tokens
        if request.status != RequestStatus.RUNNING:
            self.memory.release(request_id)
            self._preempted.pop(request_id, None)
        elif self._can_skip_tokens and self._policy.mirrors(num_tokens, request.num_prompt_tokens):
            self._preempted[request_id] = num_tokens
            self.memory.preempt(request_id)
        else:
            self.memory.release(request_id)

    def forget_preempted(self) -> None:
        """What preempted requests have computed is of no use any more: weights may have changed."""
        for request_id in self._preempted:
            self.memory.release(request_id)
        self._preempted.clear()

    def take_orders(self) -> StepOrders:
        """What has to be said to the workers with the step that was just scheduled."""
        orders, self._orders = self._orders, StepOrders()
        return orders

    def _placement(self, request: Request) -> Placement | None:
        if not self._can_skip_tokens:
            return None
        num_tokens = min(self._preempted.get(request.request_id, 0), request.num_tokens - 1)
        if num_tokens < self._policy.min_context_tokens:
            return None
        return self._placed(num_tokens, None)

    def _placed(self, num_tokens: int, context_id: str | None) -> Placement:
        size = self._policy.block_size_tokens
        return Placement(num_tokens, num_tokens // size * size, context_id)

    def _reserve(self, request: Request, num_tokens: int) -> bool:
        num_tokens = min(num_tokens, self._max_model_len)
        if not self._policy.mirrors(num_tokens, request.num_prompt_tokens):
            return True
        dropped = self.memory.reserve(request.request_id, num_tokens)
        if dropped is None:
            return False
        for other in dropped:
            self._preempted.pop(other, None)
        self._orders.dropped += dropped
        return True

    def _check_capacity(self) -> None:
        needed = self.memory.bytes_for(self._max_model_len)
        if needed > self.memory.capacity_bytes:
            gib = 1 << 30
            raise ValueError(
                "additional_config.relay.host_memory_gib: one request of max_model_len="
                f"{self._max_model_len} tokens needs {needed / gib:.2f} GiB of host memory, and "
                f"{self.memory.capacity_bytes / gib:.2f} GiB are there: raise it to what the "
                "machine has, or lower --max-model-len"
            )


def _capacity_bytes(host_memory_gib: float | None) -> int:
    if host_memory_gib is None:
        return default_capacity_bytes()
    return int(host_memory_gib * (1 << 30))


def _bytes_per_token(kv_cache_config: KVCacheConfig, num_ranks: int) -> int:
    """Keys, values and eight-bit codes of the keys, in all layers and ranks."""
    num_bytes = 0
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        if isinstance(spec, RelaySparseSpec):
            codes = spec.num_kv_heads * spec.head_size
            num_bytes += len(group.layer_names) * (spec.page_size_bytes // spec.block_size + codes)
    return num_bytes * num_ranks

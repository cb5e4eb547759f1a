# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of long contexts: hooks into vLLM's KV cache manager.

A request whose first tokens are in host memory starts behind them: its block table names the null
block for them, which nobody reads, and a block of its own for what is left of the last one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.request import Request, RequestStatus

from vllm_relay.config import RelayConfig
from vllm_relay.long_context.orders import (
    ContextReport,
    KeptContext,
    Placement,
    StepOrders,
)
from vllm_relay.long_context.scheduling.catalog import ContextCatalog
from vllm_relay.long_context.scheduling.client_quota import ClientQuota
from vllm_relay.long_context.scheduling.context_bytes import ContextBytes, bytes_with_parents
from vllm_relay.long_context.scheduling.host_memory import HostMemory, Reused
from vllm_relay.long_context.scheduling.kv_cache_spec import (
    RelaySparseManager,
    host_bytes_per_token,
)
from vllm_relay.long_context.scheduling.memory import default_capacity_bytes, total_bytes
from vllm_relay.long_context.scheduling.reusable_requests import is_kept, is_known_by_tokens
from vllm_relay.long_context.stats import COUNTERS, GAUGES, LONG_CONTEXTS, LongContextStats
from vllm_relay.sparse.contexts.context_store import context_id_of

_MAX_DECLARED = 1024
"""Contexts that the operator has asked for and that are not computed yet."""


class HostBlocks(KVCacheBlocks):
    """Null blocks that stand for tokens in host memory."""

    num_tokens: int
    context_id: str | None


class LongContextScheduler:
    """Beside one vLLM scheduler, whose KV cache manager asks it.

    Raises:
        ValueError: no layer's tokens can leave the device, or the host memory is more than there
            is, or does not suffice for the longest request.
    """

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
        self.memory = HostMemory(
            _capacity_bytes(options.host_memory_gib),
            host_bytes_per_token(manager.kv_cache_config) * num_ranks,
        )
        self._check_capacity()
        self.catalog = ContextCatalog()
        self._token_ids: WeakKeyDictionary[Request, np.ndarray] = WeakKeyDictionary()
        self.has_loaded = False
        self._files: dict[str, ContextBytes] = {}
        self._declared: deque[str] = deque(maxlen=_MAX_DECLARED)
        keeps_none = options.client_contexts == "off"
        self._quota = ClientQuota(0 if keeps_none else options.max_client_context_tokens)
        self._disk_bytes = _bytes_of(options.context_disk_gib)
        self._has_folder = options.context_dir is not None
        self._num_ranks = num_ranks
        self._preempted: dict[str, int] = {}  # request -> tokens in host memory
        self._num_kept_tokens = 0
        self._block_bytes = sum(
            len(group.layer_names) * group.kv_cache_spec.page_size_bytes
            for group in manager.kv_cache_config.kv_cache_groups
        ) // len(manager.kv_cache_config.kv_cache_groups)
        self._orders = StepOrders()
        self._policy = self._block_managers[0].kv_cache_spec.policy
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
        is_mirrored = self._policy.mirrors(num_tokens, request.num_prompt_tokens)
        if not is_mirrored and request_id not in self._preempted:
            # short requests must not cost anything: there are many of them in every step
            return self._allocate_slots(
                request,
                num_new_tokens,
                num_new_computed_tokens,
                new_computed_blocks,
                *args,
                **kwargs,
            )
        reused = self._reused(request_id, new_computed_blocks)
        if is_mirrored and not self._reserve(request_id, num_tokens, reused):
            return None
        if not isinstance(new_computed_blocks, HostBlocks):
            allocated = self._allocate_slots(
                request,
                num_new_tokens,
                num_new_computed_tokens,
                new_computed_blocks,
                *args,
                **kwargs,
            )
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
            self.catalog.use(context_id)
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
                self._keep(request, num_tokens)
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
            self.delete_context(context_id)
            request = scheduler.requests.get(request_id)
            if request is None:  # it could not be kept by all ranks
                self._orders.deleted.append(context_id)
                continue
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
            "contexts": len(self.catalog),
            "context_file_bytes": bytes_with_parents(self._files.values()),
        }

    def take_orders(self) -> StepOrders:
        """What has to be said to the workers with the step that was just scheduled."""
        orders, self._orders = self._orders, StepOrders()
        return orders

    def refuse_context(
        self, num_tokens: int, num_reused: int = 0, leaving_bytes: int = 0
    ) -> tuple[int, str] | None:
        """Why a prompt of so many tokens cannot become a context, with an HTTP status; or None.

        Args:
            num_reused: first ones that another context has.
            leaving_bytes: of contexts that leave for it.
        """
        if not self._can_skip_tokens:
            return 501, (
                "contexts are kept only with prefix caching, and of models whose layers all have "
                "full attention"
            )
        least = self._policy.min_context_tokens
        if num_tokens < least:
            return 400, (
                f"a prompt of {num_tokens} tokens was given, expected at least min_context_tokens="
                f"{least}: a shorter one is computed faster than it is looked up"
            )
        if num_tokens >= self._max_model_len:
            return 400, (
                f"a prompt of {num_tokens} tokens was given, expected fewer than max_model_len="
                f"{self._max_model_len}"
            )
        needed, free = (
            self.memory.bytes_for(num_tokens - num_reused),
            self._free_for_contexts_bytes(),
        )
        if needed - leaving_bytes > free:
            return 507, (
                f"a context of {num_tokens} tokens takes {needed} bytes of host memory, and "
                f"{max(0, free)} are left beside the longest request: delete contexts, or raise "
                "host_memory_gib"
            )
        return None

    def _free_for_contexts_bytes(self) -> int:
        """What is left must hold the longest request, else that would wait forever."""
        free = self.memory.capacity_bytes - self.memory.context_bytes
        return free - self.memory.bytes_for(self._max_model_len)

    def declare_context(self, context_id: str) -> None:
        """The operator asks for a context; its request comes next, if it is not there."""
        if context_id in self.catalog:
            self.catalog.give_to_operator(context_id)
        elif context_id not in self._declared:
            self._declared.append(context_id)

    def serve_clients(self, keeps: bool) -> None:
        """The engine is that of a server: requests that ask to be kept are others'.

        Args:
            keeps: whether any are kept.
        """
        if not keeps:
            self._quota.max_tokens = 0
        elif self._quota.max_tokens is None:
            self._quota.max_tokens = self.memory.capacity_bytes // 2 // self.memory.bytes_per_token

    def delete_context(self, context_id: str) -> None:
        """No later request reuses it, and the workers do not make it if they have not begun to."""
        self.catalog.remove(context_id)
        kept = self._orders.kept
        self._orders.kept = {
            request_id: each for request_id, each in kept.items() if each.context_id != context_id
        }
        self.memory.set_context(context_id, 0)
        self._files.pop(context_id, None)

    def load_contexts(
        self, context_ids: Collection[str], tokens: Mapping[str, Sequence[int] | np.ndarray]
    ) -> None:
        """The contexts that the workers have are all there are.

        Args:
            tokens: of those that are not known yet, by id.
        """
        self.has_loaded = True
        pending = {report.context_id for report in self.pending_contexts()}
        for context_id in self.catalog.by_last_use():
            if context_id not in context_ids and context_id not in pending:
                self.delete_context(context_id)
        for context_id, each in tokens.items():
            if context_id not in self.catalog:
                self.catalog.add(context_id, np.asarray(each, np.int64))

    def pending_contexts(self) -> list[ContextReport]:
        """Those that the workers are told of with the next step."""
        return [
            ContextReport(
                context_id=kept.context_id,
                num_tokens=len(kept.tokens),
                state="indexing",
                memory_bytes=self.memory.bytes_of_context(kept.context_id) // self._num_ranks,
                file_bytes=0,
                parent_id=self.catalog.parent_of(kept.context_id),
            )
            for kept in self._orders.kept.values()
        ]

    def update_contexts(self, reports: Iterable[ContextReport]) -> None:
        """What contexts take has changed; those that have to leave a folder that is full do so."""
        known = [each for each in reports if each.context_id in self.catalog]
        for report in known:
            self.catalog.set_parent(report.context_id, report.parent_id)
            self.memory.set_context(report.context_id, report.memory_bytes * self._num_ranks)
            file = self._files.setdefault(report.context_id, ContextBytes(0))
            file.num_bytes = report.file_bytes * self._num_ranks
        for report in known:
            if report.parent_id in self._files:
                self._files[report.context_id].parent = self._files[report.parent_id]
        limit, files = self._disk_bytes, self._files
        if limit is None:
            return
        leaving = [each for each in self.catalog.in_leaving_order() if each in files]
        # what never fits is first: no other need leave for it
        for context_id in sorted(leaving, key=lambda each: files[each].num_bytes <= limit):
            if bytes_with_parents(files.values()) <= limit:
                return
            if files[context_id].num_bytes:
                self._evict(context_id)

    def take_evicted(self) -> list[str]:
        """Contexts that had to leave and that the workers have not been told of."""
        evicted, self._orders.deleted = self._orders.deleted, []
        return evicted

    def _keep(self, request: Request, num_tokens: int) -> None:
        request_id = request.request_id
        tokens = list(request.all_token_ids[:num_tokens])
        array = np.asarray(tokens, np.int64)
        context_id = context_id_of(array)
        is_clients = context_id not in self._declared
        if not is_clients:
            self._declared.remove(context_id)
        if context_id in self.catalog:
            return
        reused = self.memory.reused(request_id)
        parent_id, num_reused = (None, 0) if reused is None else reused
        leaving = self._leaving_for_client(num_tokens - num_reused, parent_id) if is_clients else []
        if leaving is None:
            return
        leaving_bytes = self.memory.freed_bytes(leaving)
        if self.refuse_context(num_tokens, num_reused, leaving_bytes) is not None:
            return
        for each in leaving:
            self._evict(each)
        # it has the memory that the request has: what that reused is not stored again
        self.catalog.add(context_id, array, parent_id, num_reused=num_reused, is_clients=is_clients)
        num_bytes = self.memory.bytes_for(num_tokens - num_reused)
        self.memory.add_context(context_id, num_bytes, request_id)
        self._orders.kept[request_id] = KeptContext(context_id, tokens)

    def _leaving_for_client(self, num_tokens: int, continued: str | None) -> list[str] | None:
        """Contexts that requests asked for and that leave for one of so many tokens, besides those
        of a context that it continues; None: it cannot be kept."""
        missing_bytes = self.memory.bytes_for(num_tokens) - self._free_for_contexts_bytes()
        return self._quota.leaving(
            num_tokens, missing_bytes, self.catalog.of_clients(), self.memory.freed_bytes,
            self.catalog.with_parents(continued),
        )  # fmt: skip

    def _placement(self, request: Request) -> Placement | None:
        size = self._policy.block_size_tokens
        least, most = max(self._policy.min_context_tokens, size), request.num_tokens - 1
        if most < least or not self._can_skip_tokens:
            return None
        num_tokens = self._preempted.get(request.request_id, 0)
        context_id = None
        may_reuse = len(self.catalog) and self._manager.prefix_cache_lookup_enabled(request)
        if num_tokens == 0 and may_reuse and is_known_by_tokens(request):
            context_id, num_tokens = self.catalog.longest_prefix(self._token_ids_of(request))
        # the logits of the last token have to be computed
        num_tokens = min(num_tokens, most)
        if num_tokens < least:
            return None
        return Placement(num_tokens, num_tokens // size * size, context_id)

    def _token_ids_of(self, request: Request) -> np.ndarray:
        """Kept: a waiting request is looked at in each step, and 131,072 tokens take 8 ms."""
        known = self._token_ids.get(request)
        if known is None or len(known) != request.num_tokens:
            known = self._token_ids[request] = np.asarray(request.all_token_ids, np.int64)
        return known

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
        context_ids = self.catalog.in_leaving_order()
        if self._has_folder and not is_alone:
            context_ids = []  # they are being written, and take no memory soon
        if reused is not None:
            context_ids = [each for each in context_ids if each != reused.context_id]
        leaving = self.memory.contexts_in_the_way(request_id, num_tokens, context_ids)
        for context_id in leaving:
            self._evict(context_id)
        if is_alone and not leaving:
            if reused is not None and reused.context_id in self.catalog:
                self._evict(reused.context_id)
            if request_id in self._preempted:
                self._drop(request_id)
        return bool(leaving)

    def _evict(self, context_id: str) -> None:
        pending = {each.context_id for each in self._orders.kept.values()}
        self.delete_context(context_id)
        if context_id not in pending:
            self._orders.deleted.append(context_id)

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


def _bytes_of(gib: float | None) -> int | None:
    return None if gib is None else int(gib * (1 << 30))


def _capacity_bytes(host_memory_gib: float | None) -> int:
    num_bytes, total = _bytes_of(host_memory_gib), total_bytes()
    if num_bytes is None:
        return default_capacity_bytes()
    if num_bytes > total:
        raise ValueError(
            f"additional_config.relay.host_memory_gib: {host_memory_gib:g} was given, and there "
            f"are {total / (1 << 30):.1f} GiB: give less than that, or leave it away for half of "
            "what is available"
        )
    return num_bytes


def _longest_hit_tokens(
    request: Request, max_cache_hit_length: int | None = None, *args: Any, **kwargs: Any
) -> int:
    """What KVCacheManager.get_computed_blocks may find; from 0.33 on its caller can bound it."""
    return request.num_tokens if max_cache_hit_length is None else max_cache_hit_length

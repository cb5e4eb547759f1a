# SPDX-License-Identifier: Apache-2.0
"""vLLM's schedulers with relay's queue, eviction policy and pins. Hooks only."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from hashlib import sha256
from itertools import accumulate, islice
from typing import Any

from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    KVCacheBlock,
    make_block_hash_with_group_id,
    resolve_block_hashes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.request import Request, RequestStatus

from vllm_relay.config import TENANT_ARG, RelayConfig
from vllm_relay.modules.engine.admission import ModuleAdmission
from vllm_relay.modules.prompt.plan import MISSED, plan_of_request
from vllm_relay.prefix_cache.chains import BlockName
from vllm_relay.prefix_cache.eviction.free_queue import make_free_queue
from vllm_relay.prefix_cache.eviction.next_use import NextUse, Rank
from vllm_relay.prefix_cache.pins.table import PinTable
from vllm_relay.prefix_cache.stats import PREFIX_CACHE, PrefixCacheRecorder
from vllm_relay.scheduler.fairness import OvertakeLimit, OvertakenCount
from vllm_relay.scheduler.lanes import Lanes
from vllm_relay.scheduler.order import PrefixOrder
from vllm_relay.scheduler.tenants import Shares, TenantLanes
from vllm_relay.scheduler.vllm_queue import PrefixRequestQueue, QueueObserver
from vllm_relay.scheduler.warm_up import LoadableBlocks, WarmUp
from vllm_relay.statistics_log import log_of
from vllm_relay.vllm_changes.configuration import is_offline
from vllm_relay.vllm_changes.scheduler import (
    answer_for_connector,
    free_block_queue,
    report_admissions,
)

OFFLINE_HOLD_S = 600.0
"""In place of `max_hold_s` where nobody waits for the first answer: a hold ends when the prefix is
there, and the bound is for what would never end it."""


def _label(request: Request) -> Any:
    extra_args = request.sampling_params.extra_args if request.sampling_params else None
    label = (extra_args or {}).get(TENANT_ARG)
    return str(label) if isinstance(label, (str, int)) else None


TENANT_OF: dict[str, Callable[[Request], Any]] = {
    "none": lambda request: None,
    "cache_salt": lambda request: request.cache_salt,
    "lora": lambda request: _adapter(request),
    "label": _label,
}
"""Whose request one is, by the value of `fair_share_by`."""


class _RelayScheduling(Scheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        vllm_config = kwargs["vllm_config"]
        self.relay_config = RelayConfig.from_vllm_config(vllm_config)
        self.next_use = NextUse()
        with free_block_queue(make_free_queue(self.relay_config.eviction, self.next_use)):
            super().__init__(*args, **kwargs)
        self._max_hold_s = self.relay_config.max_hold_s
        is_given = "max_hold_s" in self.relay_config.model_fields_set
        if not is_given and (self.relay_config.offline or is_offline(vllm_config)):
            self._max_hold_s = OFFLINE_HOLD_S
        self._tenant_of = TENANT_OF[self.relay_config.fair_share_by]
        self._shares = Shares(self.relay_config.fair_share_tokens)
        self.order_group = _full_attention_group(self.kv_cache_config)
        self._order_suffix = make_block_hash_with_group_id(BlockHash(b""), self.order_group or 0)
        self.loadable: LoadableBlocks[Request] = LoadableBlocks(self._find_loadable)
        self._connector_answers: dict[tuple[str, int], tuple[int | None, bool]] = {}  # of this step
        feeder = _NextUseFeeder(self)
        self.overtaken = feeder.overtaken
        self.waiting: PrefixRequestQueue = PrefixRequestQueue(
            self.policy == SchedulingPolicy.PRIORITY,
            feeder.order_chain,
            self._make_lanes,
            self._max_hold_s,
            feeder,
            self._blocked_now,
            goes_first=lambda request: self.modules.goes_first(request),
            lacks=lambda request: self.modules.lacks(request),
        )
        self.pins = PinTable(self, self.relay_config.max_pinned_fraction)
        self.modules = ModuleAdmission(self)
        self.relay_recorder = PrefixCacheRecorder(self)
        report_admissions(self.kv_cache_manager, self.relay_recorder.on_admitted)

    def use_clock(self, clock: Callable[[], float]) -> None:
        """Take the time in seconds from here: what waits may be served in virtual time."""
        self.waiting.clock = clock

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        began_s = time.perf_counter()
        self.pins.expire()
        self.modules.prepare()
        self.waiting.retry_blocked()
        for request in self.loadable.ask():
            self.waiting.look_again(request)
        answers, self._connector_answers = self._connector_answers, {}
        with answer_for_connector(self.connector, answers) if answers else nullcontext():
            output = super().schedule(*args, **kwargs)
        # vLLM takes requests that are held for such that it had no room for, and then heeds no
        # interval between prefills
        self.prefill_capacity_bound &= bool(self.waiting or self.kv_holding_waiting)
        self.modules.note_step(output.total_num_scheduled_tokens)
        self._charge(output.num_scheduled_tokens)
        self.relay_recorder.on_scheduled(time.perf_counter() - began_s)
        return output

    def _handle_blocked_waiting_request(self, request: Request, *args: Any, **kwargs: Any) -> bool:
        # asked right before the prefix cache is, so that nothing is evicted in between
        if not self.modules.is_ready(request):
            return False
        return super()._handle_blocked_waiting_request(request, *args, **kwargs)

    def block_keys(self, request: Request) -> list[list[bytes]]:
        """For each KV cache group, the names under which the prefix cache keeps the request's full
        blocks, from the first on."""
        keys: list[list[bytes]] = []
        for group, manager in enumerate(self.kv_cache_manager.coordinator.single_type_managers):
            hashes = resolve_block_hashes(
                request.block_hashes, self.hash_block_size, manager.block_size
            )
            suffix = make_block_hash_with_group_id(BlockHash(b""), group)
            keys.append([each + suffix for each in hashes])
        return keys

    def rank(self, request: Request, position: int) -> Rank:
        """When a request may be expected to run, before which `position` others came."""
        if self.policy == SchedulingPolicy.PRIORITY:
            return (request.priority, request.arrival_time, position)
        return (position,)

    def _cached(self, key: bytes) -> KVCacheBlock | None:
        """A block of the prefix cache, by its hash and KV cache group."""
        return self.kv_cache_manager.block_pool.cached_block_hash_to_block.get_one_block(key)

    def cached_block(self, block_hash: BlockHash) -> KVCacheBlock | None:
        """A block of the KV cache group of full attention in the prefix cache."""
        return self._cached(block_hash + self._order_suffix)

    def has_cached(self, block_hashes: Sequence[BlockHash]) -> bool:
        """Whether `cached_block` has all of them. The last one is looked for first: it leaves
        first."""
        return all(self.cached_block(each) is not None for each in reversed(block_hashes))

    def _is_resident(self, name: BlockName) -> bool:
        return self._cached(name if isinstance(name, bytes) else name[0]) is not None

    def _is_at_hand(self, name: BlockName) -> bool:
        return name in self.loadable or self._is_resident(name)

    def _find_loadable(
        self, request: Request, chain: Sequence[BlockName]
    ) -> Sequence[BlockName] | None:
        """The blocks that the connector can load for a request which it was told of; None: it does
        not know yet."""
        depth = 0
        while depth < len(chain) and self._is_resident(chain[depth]):
            depth += 1
        if depth == len(chain):
            return ()
        manager = self.kv_cache_manager.coordinator.single_type_managers[self.order_group or 0]
        computed_tokens = depth * manager.block_size // self.block_size * self.block_size
        tokens, _ = answer = self.connector.get_num_new_matched_tokens(request, computed_tokens)
        self._connector_answers[request.request_id, computed_tokens] = answer
        if tokens is None:
            return None
        return chain[depth : (computed_tokens + tokens) // manager.block_size]

    def _make_lanes(self) -> TenantLanes[Request]:
        return TenantLanes(self._make_tenants_lanes, self._tenant_of, self._shares)

    def _make_tenants_lanes(self) -> Lanes[Request]:
        # other kinds of KV cache do not keep all blocks of a prefix: nobody could tell its end
        warms_up = self.relay_config.warm_up and self.order_group is not None
        return Lanes(
            PrefixOrder(self._is_at_hand),
            WarmUp(
                self._is_resident, self._max_hold_s if warms_up else 0.0, self.loadable.__contains__
            ),
            OvertakeLimit(self._max_hold_s, self.relay_config.max_overtakes),
        )

    def _charge(self, num_scheduled_tokens: dict[str, int]) -> None:
        """Charge tenants for what a step computes."""
        if self.relay_config.fair_share_by != "none":
            for request_id, tokens in num_scheduled_tokens.items():
                self._shares.charge(self._tenant_of(self.requests[request_id]), tokens)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self._uncache_uncomputed(request)
        super()._preempt_request(request, *args, **kwargs)

    def _uncache_uncomputed(self, request: Request) -> None:
        """Blocks are in the cache from when they are scheduled. By priority, vLLM also preempts
        requests that it has scheduled in the same step: no other may find what they do not compute.

        Remove when: vLLM takes such blocks out of its cache itself.
        """
        block_ids = {
            block.block_id
            for manager in self.kv_cache_manager.coordinator.single_type_managers
            for block in manager.req_to_blocks[request.request_id][
                request.num_computed_tokens // manager.block_size :
            ]
            if not block.is_null
        }
        self.kv_cache_manager.evict_blocks(block_ids)

    def _blocked_now(self) -> Callable[[Request], bool]:
        """What tells of waiting requests whether they lack a grammar or room for their adapter."""
        max_adapters = self.lora_config.max_loras if self.lora_config else 0
        adapters = {_adapter(request) for request in self.running} - {0}

        def is_blocked(request: Request) -> bool:
            if request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
                structured = request.structured_output_request
                return structured is not None and not structured.is_grammar_ready
            adapter = _adapter(request)
            return adapter != 0 and adapter not in adapters and len(adapters) >= max_adapters

        return is_blocked

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        kv_transfer_params, *others = super()._free_request(request, *args, **kwargs)
        if missed := getattr(request, MISSED, None):  # see vllm_changes.requests.carry_to_outputs
            kv_transfer_params = {**(kv_transfer_params or {}), MISSED: sorted(missed)}
        return kv_transfer_params, *others

    def _free_request_blocks(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self.waiting.release(request)
        if request.is_finished():
            self.waiting.forget(request)
            self.modules.forget(request)
        self.pins.before_free(request)
        super()._free_request_blocks(request, *args, **kwargs)

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        scheduler_stats = super().make_stats(*args, **kwargs)
        if scheduler_stats is None and not self.relay_config.log_every_s:
            return None
        step = self.relay_recorder.take()
        if step is not None:
            log_of(self).add(step, self.relay_recorder.text_of)
            if scheduler_stats is not None:
                relay = scheduler_stats.relay or {}
                scheduler_stats.relay = {**relay, PREFIX_CACHE: asdict(step)}
        return scheduler_stats

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        self.pins.reset()
        self.modules.release()
        self.loadable.forget()
        is_reset = False
        try:
            is_reset = super().reset_prefix_cache(*args, **kwargs)
        finally:
            if not is_reset:
                self.pins.undo_reset()
        return is_reset


class SyncRelayScheduler(_RelayScheduling):
    """vLLM's Scheduler with relay's order and prefix cache."""


class AsyncRelayScheduler(_RelayScheduling, AsyncScheduler):
    """vLLM's AsyncScheduler with relay's order and prefix cache."""


class _NextUseFeeder(QueueObserver):
    """Tells the eviction policy which blocks waiting requests need."""

    def __init__(self, scheduler: _RelayScheduling) -> None:
        self._scheduler = scheduler
        self.overtaken = OvertakenCount()
        # of those that may find blocks in the prefix cache: the others have nothing to wait for
        self._ranks: dict[Request, Rank] = {}
        self._order_chains: dict[Request, Sequence[BlockName]] = {}

    def waits(self, request: Request, position: int) -> None:
        if not request.num_preemptions:  # the others had their turn
            self.overtaken.waits(position)
        scheduler = self._scheduler
        if not scheduler.kv_cache_manager.prefix_cache_lookup_enabled(request):
            return
        keys, plan = scheduler.block_keys(request), plan_of_request(request)
        ordered_by = keys[scheduler.order_group or 0]
        self._order_chains[request] = ordered_by if plan is None else _chained(ordered_by)
        rank = self._ranks[request] = scheduler.rank(request, position)
        chains = keys if plan is None else [run for each in keys for run in plan.chains(each)]
        scheduler.next_use.add(rank, chains)
        if scheduler.connector is not None and not request.num_preemptions:
            scheduler.loadable.add(request, self._order_chains[request])

    def waits_no_longer(self, request: Request, position: int, runs: bool) -> None:
        if not request.num_preemptions:
            self.overtaken.waits_no_longer(position, runs)
        self._scheduler.loadable.discard(request)
        rank = self._ranks.pop(request, None)
        if rank is not None:
            del self._order_chains[request]
            self._scheduler.next_use.remove(rank, runs=runs and not request.num_preemptions)

    def order_chain(self, request: Request) -> Sequence[BlockName]:
        """What a waiting request is ordered by."""
        return self._order_chains.get(request, ())


def _chained(keys: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    """Keys of blocks of modules, which say nothing of the blocks before them, each with a digest of
    all up to it."""
    digests = accumulate(keys, lambda digest, key: sha256(digest + key).digest(), initial=b"")
    return list(zip(keys, islice(digests, 1, None), strict=True))


def _adapter(request: Request) -> int:
    """The id of its LoRA adapter; 0 without."""
    return request.lora_request.lora_int_id if request.lora_request else 0


def _full_attention_group(kv_cache_config: KVCacheConfig) -> int | None:
    """A KV cache group that keeps every block of a prefix."""
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        if isinstance(group.kv_cache_spec, FullAttentionSpec):
            return index
    return None

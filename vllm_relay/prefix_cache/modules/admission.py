# SPDX-License-Identifier: Apache-2.0
"""Requests with modules wait until all of these are in the prefix cache; what is not there is
computed first, by requests of the scheduler's own, once for all that wait for it.

Otherwise a request would compute a missing module behind those before it, and these keys and values
would lie in the cache as those of the module alone.
"""

from __future__ import annotations

from itertools import count
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from vllm_relay.prefix_cache.modules.plan import EXTRA_ARG, ModulePlan
from vllm_relay.prefix_cache.modules.requests import plan_of_request

ENCODING_PREFIX = "relay-module-"
"""What the ids of requests begin with that compute a module."""


class ModuleAdmission:
    """Beside a RelayScheduler."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._waiting: dict[str, Request] = {}
        self._encoding: dict[bytes, str] = {}  # last block of a module -> who computes it
        self._keys: dict[str, bytes] = {}
        self._numbers = count()
        self._lease = _Lease(scheduler)

    def add(self, request: Request) -> None:
        """A request begins to wait."""
        if plan_of_request(request) is not None:
            self._waiting[request.request_id] = request

    def forget(self, request: Request) -> None:
        """A request has ended."""
        self._waiting.pop(request.request_id, None)
        if request is self._lease.request:
            self._lease.release()
        if (key := self._keys.pop(request.request_id, None)) is not None:
            del self._encoding[key]
            self._count(request)

    def _count(self, encoding: Request) -> None:
        plan = plan_of_request(encoding)
        assert plan is not None
        num_blocks = (plan.num_prompt_slots - plan.num_stored_slots) // plan.block_size
        scheduler = self._scheduler
        scheduler.relay_recorder.on_module_computed(num_blocks * scheduler.pins.block_bytes)

    def is_ready(self, request: Request) -> bool:
        """Whether the prefix cache has everything of a waiting request that modules hold."""
        plan = plan_of_request(request)
        return plan is None or self._has(request, 0, plan.num_stored_slots)

    def goes_first(self, request: Request) -> bool:
        """Whether a waiting request is one that others wait for."""
        return request.request_id in self._keys

    def prepare(self) -> None:
        """Have computed what waiting requests lack; before every step."""
        if not self._waiting:
            return
        for request in list(self._waiting.values()):
            if request.status == RequestStatus.RUNNING:
                del self._waiting[request.request_id]
                if request is self._lease.request:
                    self._lease.release()
                continue
            plan = plan_of_request(request)
            assert plan is not None
            if not self._has(request, 0, plan.num_stored_slots):
                self._compute_missing(request, plan)
        self._extend_lease()

    def release(self) -> None:
        """Let all modules be evicted, as the prefix cache is going to be emptied."""
        self._lease.release()

    def num_records(self) -> int:
        """How much is kept about requests: nothing when all are done."""
        held = self._lease.request is not None
        return len(self._waiting) + len(self._encoding) + len(self._keys) + held

    def _extend_lease(self) -> None:
        """The oldest waiting request keeps what is there of its modules: where memory is short,
        others would evict it while the rest is computed, and it would never run."""
        if self._lease.request is None:
            users = [each for each in self._waiting.values() if not self.goes_first(each)]
            if not users:
                return
            self._lease.request = min(users, key=lambda each: (each.priority, each.arrival_time))
        plan = plan_of_request(self._lease.request)
        assert plan is not None
        self._lease.extend(plan.num_stored_slots // plan.block_size)

    def _has(self, request: Request, first_slot: int, end_slot: int) -> bool:
        size = self._scheduler.block_size
        hashes = request.block_hashes[first_slot // size : end_slot // size]
        return all(self._scheduler.cached_block(each) is not None for each in hashes)

    def _compute_missing(self, request: Request, plan: ModulePlan) -> None:
        size = plan.block_size
        num_stored = len(plan.segments) - plan.encodes
        for index in reversed(range(num_stored)):  # the last one to come goes first
            first, end = plan.first_slots[index : index + 2]
            key = request.block_hashes[end // size - 1]
            if key not in self._encoding and not self._has(request, first, end):
                encoding = self._encoding_request(request, plan, index)
                self._encoding[key] = encoding.request_id
                self._keys[encoding.request_id] = key
                self._scheduler.add_request(encoding)

    def _encoding_request(self, request: Request, plan: ModulePlan, index: int) -> Request:
        slots = plan.encoding_slots(index)
        assert request.prompt_token_ids is not None
        token_ids = [token for a, b in slots for token in request.prompt_token_ids[a:b]]
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            detokenize=False,
            extra_args={EXTRA_ARG: plan.encoding_plan(index).to_argument()},
        )
        return Request(
            request_id=f"{ENCODING_PREFIX}{next(self._numbers)}",
            prompt_token_ids=token_ids,
            sampling_params=params,
            pooling_params=None,
            client_index=request.client_index,
            arrival_time=request.arrival_time,
            lora_request=request.lora_request,
            cache_salt=request.cache_salt,
            priority=request.priority,
            block_hasher=request._block_hasher,
        )


class _Lease:
    """Blocks that one waiting request holds.

    Attributes:
        request: whose they are; None: there is none.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._blocks: dict[int, Any] = {}  # by their place in the request
        self.request: Request | None = None

    def extend(self, num_blocks: int) -> None:
        """Hold those of its first blocks that are there by now."""
        assert self.request is not None
        for place, block_hash in enumerate(self.request.block_hashes[:num_blocks]):
            if place not in self._blocks:
                block = self._scheduler.cached_block(block_hash)
                if block is not None:
                    self._scheduler.kv_cache_manager.block_pool.touch([block])
                    self._blocks[place] = block

    def release(self) -> None:
        blocks = [self._blocks[place] for place in sorted(self._blocks, reverse=True)]
        self._scheduler.kv_cache_manager.block_pool.free_blocks(blocks)
        self._blocks.clear()
        self.request = None

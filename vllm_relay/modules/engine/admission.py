# SPDX-License-Identifier: Apache-2.0
"""Requests with modules wait until all of these are in the prefix cache; what is not there is
computed first, by requests of the scheduler's own, once for all that wait for it.

Otherwise a request would compute a missing module behind those before it, and these keys and values
would lie in the cache as those of the module alone.
"""

from __future__ import annotations

from copy import copy
from itertools import count
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from vllm_relay.config import TENANT_ARG
from vllm_relay.modules.engine.waiting import WaitingRequests
from vllm_relay.modules.prompt.plan import EXTRA_ARG, MISSED, ModulePlan, plan_of_request

ENCODING_PREFIX = "relay-module-"
"""What the ids of requests begin with that compute a module."""


_LOOKS_PER_STEP = 16
"""At how many waiting requests a step looks anew that lack something still, and how many that lack
nothing it offers, besides those for which there are seats."""
_NEW_PER_STEP = 4
"""How many computations of modules a step begins for the leader, and for others."""


class ModuleAdmission:
    """Beside a RelayScheduler.

    One waiting request leads: of those that lack a module the oldest of the highest priority. What
    it lacks is computed before all else, and what is there of its modules is held until it runs: so
    it runs however little memory there is. Once it has all it waits like any other. Modules that
    others lack are computed in their turn, as far as there is room.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._waiting: WaitingRequests[Request] = WaitingRequests(self._has_module)
        self._encodings: dict[bytes, Request] = {}  # by the last block of their module
        self._keys: dict[str, bytes] = {}  # by id of the encoding
        self._first: set[bytes] = set()  # keys of the encodings that the leader waits for
        self._lease = _Lease(scheduler)
        self._was_idle = False
        self._numbers = count()
        self._params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)

    def lacks(self, request: Request) -> bool:
        """Whether a request that begins to wait or goes on lacks modules. If so, the queue is given
        it again when they are there."""
        plan = plan_of_request(request)
        if plan is None:
            return False
        keys = [_key(request, plan, index) for index in range(len(plan.segments) - plan.encodes)]
        rank = (request.request_id in self._keys, request.priority, request.arrival_time)
        if not self._waiting.add(request, keys, rank):
            return False
        if not request.num_preemptions:
            missed = {*getattr(request, MISSED, ()), *self._waiting.missing(request)}
            setattr(request, MISSED, missed)
        return True

    def forget(self, request: Request) -> None:
        """A request has ended."""
        self._waiting.discard(request)
        if request is self._lease.request:
            self.release()
        if (key := self._keys.pop(request.request_id, None)) is not None:
            del self._encodings[key]
            self._first.discard(key)
            self._waiting.arrived(key)
            if request.status != RequestStatus.FINISHED_ABORTED:
                self._count(request)

    def is_ready(self, request: Request) -> bool:
        """Whether the prefix cache has everything of a waiting request that modules hold."""
        plan = plan_of_request(request)
        if plan is None:
            return True
        num_blocks = plan.num_stored_slots // plan.block_size
        return self._scheduler.has_cached(request.block_hashes[:num_blocks])

    def goes_first(self, request: Request) -> bool:
        """Whether a waiting request comes before the others of its priority: it computes what the
        leader lacks."""
        key = self._keys.get(request.request_id)
        return key is not None and key in self._first

    def prepare(self) -> None:
        """Have computed what waiting requests lack, and offer those that lack nothing any more;
        before every step."""
        for key, encoding in self._encodings.items():
            if encoding.num_computed_tokens >= encoding.num_prompt_tokens:
                self._waiting.arrived(key)
        scheduler, queue = self._scheduler, self._scheduler.waiting
        num_seats = scheduler.max_num_running_reqs - len(scheduler.running) - queue.num_offered
        limit = max(_LOOKS_PER_STEP, num_seats)
        for request in self._waiting.take_able(limit, _LOOKS_PER_STEP):
            queue.offer(request)
        self._lead()
        self._compute_ahead()
        self._hold()

    def note_step(self, num_tokens: int) -> None:
        """How many tokens have been scheduled in a step."""
        self._was_idle = num_tokens == 0 and not self._scheduler.running

    def release(self) -> None:
        """Nobody leads any more; modules that were held can be evicted."""
        self._lease.end()
        self._first.clear()

    def _lead(self) -> None:
        """Choose a leader if there is none, and have computed what it lacks."""
        leader = self._lease.request
        if leader is not None and leader.status == RequestStatus.RUNNING:
            self.release()
            leader = None
        if leader is None:
            leader = self._lease.request = self._oldest()
        if leader is None or leader not in self._waiting:
            return
        missing = self._waiting.missing(leader)
        for index in reversed(missing[:_NEW_PER_STEP]):  # the last one to come goes first
            plan = _plan_of(leader)
            key = _key(leader, plan, index)
            encoding = self._encodings.get(key)
            if encoding is None:
                self._first.add(key)
                self._compute(leader, plan, index)
            elif key not in self._first:
                self._first.add(key)
                self._move_first(encoding, min(encoding.priority, leader.priority))

    def _oldest(self) -> Request | None:
        """Of those that lack something."""
        for _ in range(_LOOKS_PER_STEP):
            request = self._waiting.first()
            if request is None or self._waiting.still_lacks(request):
                return request
            self._scheduler.waiting.offer(request)
        return None

    def _compute_ahead(self) -> None:
        """Begin to compute what others lack: work for two steps at most, without driving out what
        is there."""
        scheduler = self._scheduler
        to_come = sum(
            each.num_prompt_tokens - each.num_computed_tokens for each in self._encodings.values()
        )
        free_blocks = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        room = free_blocks * scheduler.block_size // 2 - to_come
        enough = 2 * scheduler.max_num_scheduled_tokens - to_come
        for _ in range(_NEW_PER_STEP):
            found = self._waiting.wanted() if min(room, enough) > 0 else None
            if found is None:
                return
            request, index = found
            plan = _plan_of(request)
            key = _key(request, plan, index)
            num_slots = sum(end - first for first, end in plan.encoding_slots(index))
            if key in self._encodings:
                self._waiting.computed(key)
            elif num_slots > room:
                self._waiting.postpone(key)
            else:
                room, enough = room - num_slots, enough - num_slots
                self._compute(request, plan, index)

    def _hold(self) -> None:
        """Keep what is there of the leader's modules."""
        leader = self._lease.request
        if leader is None:
            return
        if self._was_idle:
            # what it holds is in the way of a request before it, and nobody runs
            self._lease.drop_blocks()
            return
        plan = _plan_of(leader)
        self._lease.extend(plan.num_stored_slots // plan.block_size)

    def _has_module(self, request: Request, index: int) -> bool:
        plan = _plan_of(request)
        first, end = plan.first_slots[index] // plan.block_size, plan.first_slots[index + 1]
        hashes = request.block_hashes[first : end // plan.block_size]
        return self._scheduler.has_cached(hashes)

    def _compute(self, request: Request, plan: ModulePlan, index: int) -> None:
        key = _key(request, plan, index)
        encoding = self._encodings[key] = self._encoding_request(request, plan, index)
        self._keys[encoding.request_id] = key
        self._waiting.computed(key)
        self._scheduler.add_request(encoding)

    def _move_first(self, request: Request, priority: int) -> None:
        if request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            self._scheduler.waiting.remove_requests([request])
            request.priority = priority
            self._scheduler.waiting.add_request(request)

    def _count(self, encoding: Request) -> None:
        plan = _plan_of(encoding)
        num_blocks = (plan.num_prompt_slots - plan.num_stored_slots) // plan.block_size
        scheduler = self._scheduler
        scheduler.relay_recorder.on_module_computed(num_blocks * scheduler.pins.block_bytes)

    def _encoding_request(self, request: Request, plan: ModulePlan, index: int) -> Request:
        assert request.prompt_token_ids is not None
        encoding_plan = plan.encoding_plan(index)
        params = copy(self._params)
        params.extra_args = {EXTRA_ARG: encoding_plan.to_argument()}
        asked = request.sampling_params.extra_args if request.sampling_params else None
        if asked is not None and TENANT_ARG in asked:
            params.extra_args[TENANT_ARG] = asked[TENANT_ARG]
        # they are named alike in every request
        hashes = [
            block_hash
            for first, end in plan.encoding_slots(index)
            for block_hash in request.block_hashes[
                first // plan.block_size : end // plan.block_size
            ]
        ]
        return Request(
            request_id=f"{ENCODING_PREFIX}{next(self._numbers)}",
            prompt_token_ids=plan.encoding_tokens(index, request.prompt_token_ids),
            sampling_params=params,
            pooling_params=None,
            client_index=request.client_index,
            arrival_time=request.arrival_time,
            lora_request=request.lora_request,
            cache_salt=request.cache_salt,
            priority=request.priority,
            block_hasher=lambda encoding: hashes[len(encoding.block_hashes) :],
        )


def _plan_of(request: Request) -> ModulePlan:
    """Of a request that has one."""
    plan = plan_of_request(request)
    assert plan is not None
    return plan


def _key(request: Request, plan: ModulePlan, index: int) -> bytes:
    """The name of a module: that of its last block."""
    return request.block_hashes[plan.first_slots[index + 1] // plan.block_size - 1]


class _Lease:
    """Blocks that one waiting request, if there is one, holds."""

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

    def drop_blocks(self) -> None:
        """Let them be evicted."""
        blocks = [self._blocks[place] for place in sorted(self._blocks, reverse=True)]
        self._scheduler.kv_cache_manager.block_pool.free_blocks(blocks)
        self._blocks.clear()

    def end(self) -> None:
        """Let them be evicted, and belong to nobody."""
        self.drop_blocks()
        self.request = None

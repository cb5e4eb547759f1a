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

from vllm_relay.modules.prompt.plan import EXTRA_ARG, ModulePlan, plan_of_request

ENCODING_PREFIX = "relay-module-"
"""What the ids of requests begin with that compute a module."""


class ModuleAdmission:
    """Beside a RelayScheduler.

    One waiting request leads: the oldest of the highest priority. What it lacks is computed before
    all else, what is there of its modules is held, and when it has all it runs next; so it runs
    however little memory there is. Modules that others lack are computed in their turn, as far as
    there is room.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._waiting: dict[str, Request] = {}
        self._not_ready: set[str] = set()  # of these, when the step was prepared
        self._encodings: dict[bytes, Request] = {}  # by the last block of their module
        self._keys: dict[str, bytes] = {}  # by id of the encoding
        self._first: set[bytes] = set()  # keys of the encodings that the leader waits for
        self._lease = _Lease(scheduler)
        self._room_slots = 0  # in a step, for modules that the leader does not need
        self._was_idle = False
        self._numbers = count()

    def add(self, request: Request) -> None:
        """A request begins to wait."""
        if plan_of_request(request) is not None:
            self._waiting[request.request_id] = request

    def forget(self, request: Request) -> None:
        """A request has ended."""
        self._waiting.pop(request.request_id, None)
        self._not_ready.discard(request.request_id)
        if request is self._lease.request:
            self.release()
        if (key := self._keys.pop(request.request_id, None)) is not None:
            del self._encodings[key]
            self._first.discard(key)
            if request.status != RequestStatus.FINISHED_ABORTED:
                self._count(request)

    def is_ready(self, request: Request) -> bool:
        """Whether the prefix cache has everything of a waiting request that modules hold."""
        plan = plan_of_request(request)
        return plan is None or self._has(request, 0, plan.num_stored_slots)

    def was_ready(self, request: Request) -> bool:
        """Whether it had when the step was prepared."""
        return request.request_id not in self._not_ready

    def goes_first(self, request: Request) -> bool:
        """Whether a waiting request comes before the others of its priority."""
        if request is self._lease.request:
            return True
        key = self._keys.get(request.request_id)
        return key is not None and key in self._first

    def prepare(self) -> None:
        """Have computed what waiting requests lack; before every step."""
        self._not_ready.clear()
        if not self._waiting:
            return
        for request in list(self._waiting.values()):
            if request.status == RequestStatus.RUNNING:
                del self._waiting[request.request_id]
                if request is self._lease.request:
                    self.release()
        self._choose_leader()
        self._room_slots = self._free_slots()
        is_there: dict[bytes, bool] = {}
        for request in list(self._waiting.values()):
            missing = self._missing(request, is_there)
            if missing:
                self._not_ready.add(request.request_id)
                self._compute(request, missing)
        self._hold()

    def note_step(self, num_tokens: int) -> None:
        """How many tokens have been scheduled in a step."""
        self._was_idle = num_tokens == 0 and not self._scheduler.running

    def release(self) -> None:
        """Nobody leads any more; modules that were held can be evicted."""
        self._lease.end()
        self._first.clear()

    def num_records(self) -> int:
        """How much is kept about requests: nothing when all are done."""
        held = self._lease.request is not None
        kept = (self._waiting, self._not_ready, self._encodings, self._keys, self._first)
        return sum(map(len, kept)) + held

    def _choose_leader(self) -> None:
        users = [each for each in self._waiting.values() if each.request_id not in self._keys]
        if self._lease.request is None and users:
            leader = min(users, key=lambda each: (each.priority, each.arrival_time))
            self._lease.request = leader
            self._move_first(leader, leader.priority)

    def _hold(self) -> None:
        """Keep what is there of the leader's modules."""
        leader = self._lease.request
        if leader is None:
            return
        if self._was_idle:
            # what it holds is in the way of a request before it, and nobody runs
            self._lease.drop_blocks()
            return
        plan = plan_of_request(leader)
        assert plan is not None
        self._lease.extend(plan.num_stored_slots // plan.block_size)

    def _has(self, request: Request, first_slot: int, end_slot: int) -> bool:
        size = self._scheduler.block_size
        hashes = request.block_hashes[first_slot // size : end_slot // size]
        return all(self._scheduler.cached_block(each) is not None for each in hashes)

    def _missing(self, request: Request, is_there: dict[bytes, bool]) -> list[int]:
        """The segments that it lacks.

        Args:
            is_there: what is known of modules by their last block; is added to.
        """
        plan = plan_of_request(request)
        assert plan is not None
        missing = []
        for index in range(len(plan.segments) - plan.encodes):
            first, end = plan.first_slots[index : index + 2]
            key = request.block_hashes[end // plan.block_size - 1]
            if key not in is_there:
                is_there[key] = self._has(request, first, end)
            if not is_there[key]:
                missing.append(index)
        return missing

    def _compute(self, request: Request, missing: list[int]) -> None:
        plan = plan_of_request(request)
        assert plan is not None
        leads = request is self._lease.request
        for index in reversed(missing):  # of those that go first, the last one to come does
            key = request.block_hashes[plan.first_slots[index + 1] // plan.block_size - 1]
            encoding = self._encodings.get(key)
            if encoding is None:
                num_slots = sum(end - first for first, end in plan.encoding_slots(index))
                if not leads and num_slots > self._room_slots:
                    continue
                self._room_slots -= num_slots
                encoding = self._encoding_request(request, plan, index)
                self._encodings[key] = encoding
                self._keys[encoding.request_id] = key
                if leads:
                    self._first.add(key)
                self._scheduler.add_request(encoding)
            elif leads and key not in self._first:
                self._first.add(key)
                self._move_first(encoding, min(encoding.priority, request.priority))

    def _free_slots(self) -> int:
        """How much may be computed for later without driving out what is there."""
        free_blocks = self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        to_come = sum(
            each.num_prompt_tokens - each.num_computed_tokens for each in self._encodings.values()
        )
        return free_blocks * self._scheduler.block_size // 2 - to_come

    def _move_first(self, request: Request, priority: int) -> None:
        if request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            self._scheduler.waiting.remove_requests([request])
            request.priority = priority
            self._scheduler.waiting.add_request(request)

    def _count(self, encoding: Request) -> None:
        plan = plan_of_request(encoding)
        assert plan is not None
        num_blocks = (plan.num_prompt_slots - plan.num_stored_slots) // plan.block_size
        scheduler = self._scheduler
        scheduler.relay_recorder.on_module_computed(num_blocks * scheduler.pins.block_bytes)

    def _encoding_request(self, request: Request, plan: ModulePlan, index: int) -> Request:
        assert request.prompt_token_ids is not None
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            detokenize=False,
            extra_args={EXTRA_ARG: plan.encoding_plan(index).to_argument()},
        )
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

    def drop_blocks(self) -> None:
        """Let them be evicted."""
        blocks = [self._blocks[place] for place in sorted(self._blocks, reverse=True)]
        self._scheduler.kv_cache_manager.block_pool.free_blocks(blocks)
        self._blocks.clear()

    def end(self) -> None:
        """Let them be evicted, and belong to nobody."""
        self.drop_blocks()
        self.request = None

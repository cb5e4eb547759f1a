# SPDX-License-Identifier: Apache-2.0
"""vLLM's engine with a simulated worker that keeps long requests in host memory, as it is told:
every token that a step reads must be where the window says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from vllm import LLMEngine, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import RequestStatus

from tests.integration.tiny_models import MAX_MODEL_LEN_TOKENS
from tests.scheduler.simulated_engine import SimulatedExecutor, answer, start
from tests.scheduler.soak import Question
from vllm_relay.long_context.orders import (
    KEEP_ARG,
    ContextReport,
    Placement,
    StepOrders,
    orders_of,
)
from vllm_relay.long_context.scheduling import host_memory
from vllm_relay.long_context.scheduling.kv_cache_spec import RelaySparseSpec

BLOCK_SIZE = 32
GRANULE_TOKENS = 64
WINDOW = {"min_context_tokens": 64, "sink_tokens": 20, "window_tokens": 70}
BYTES_PER_TOKEN = 2 * (2 * 2 * 32 * 4 + 2 * 64 + 4)
"""Of the tiny model: two layers of two float32 heads of 32, their codes and means."""


@dataclass
class HostCopy:
    """What the host has of a request: one number per token, from the first one on; those before
    `begin` are the context's."""

    num_prompt_tokens: int
    states: list[int] = field(default_factory=list)
    first_resident_token: int = 0
    begin: int = 0
    context: HostContext | None = None

    def drop(self) -> None:
        self.states, self.begin, self.context = [], 0, None


@dataclass(eq=False)
class HostContext:
    """`own_states` are those of the tokens behind the parent's, of which `begin` count."""

    id: str
    tokens: list[int]
    begin: int
    own_states: list[int]
    parent: HostContext | None

    @property
    def states(self) -> list[int]:
        return ([] if self.parent is None else self.parent.states[: self.begin]) + self.own_states

    def with_parents(self) -> set[HostContext]:
        return {self} | (set() if self.parent is None else self.parent.with_parents())


class LongContextExecutor(SimulatedExecutor):
    """Raises AssertionError where a token that is read is not there, or of another text."""

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> Any:
        (config,) = kv_cache_configs
        (group,) = config.kv_cache_groups
        assert isinstance(group.kv_cache_spec, RelaySparseSpec)
        self.spec = group.kv_cache_spec
        self.copies: dict[str, HostCopy] = {}
        self.contexts: dict[str, HostContext] = {}
        self.placements: list[tuple[str, Placement]] = []
        self.dropped: list[str] = []
        self.reads_from_host = 0
        self.most_blocks = 0
        self.on_step: Callable[[SchedulerOutput], None] = lambda scheduler_output: None
        return super().initialize_from_config(kv_cache_configs)

    @property
    def num_host_tokens(self) -> int:
        """Of requests and contexts, each where it is once."""
        contexts = {copy.context for copy in self.copies.values() if copy.context is not None}
        contexts |= set(self.contexts.values())
        own = sum(len(copy.states) - copy.begin for copy in self.copies.values())
        kept = {each for context in contexts for each in context.with_parents()}
        return own + sum(len(each.own_states) for each in kept)

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(method, "__name__", "") == "_reports_of_worker":
            (reopen,) = kwargs["args"]
            if reopen:
                self.contexts.clear()
            return [
                [
                    ContextReport(
                        context_id,
                        len(each.tokens),
                        "memory",
                        len(each.own_states) * BYTES_PER_TOKEN,
                        0,
                        parent_id=None if each.parent is None else each.parent.id,
                        num_own_tokens=len(each.own_states),
                    )
                    for context_id, each in self.contexts.items()
                ]
            ]
        if getattr(method, "__name__", "") == "_tokens_in_worker":
            (context_ids,) = kwargs["args"]
            return [{each: np.array(self.contexts[each].tokens) for each in context_ids}]
        if getattr(method, "__name__", "") == "_delete_in_worker":
            (context_id,) = kwargs["args"]
            self.contexts.pop(context_id, None)
            return [None]
        return super().collective_rpc(method, *args, **kwargs)

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        orders = orders_of(scheduler_output)
        for context_id in orders.deleted:
            del self.contexts[context_id]
        for request_id in scheduler_output.finished_req_ids:
            self._end(request_id, orders)
        for request_id in orders.dropped:
            self.dropped.append(request_id)
            self.copies[request_id].drop()
        for new in scheduler_output.scheduled_new_reqs:
            self._take(new)
            self._place(new.req_id, orders.placed.get(new.req_id), new.num_computed_tokens)
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, num_computed in zip(
            cached.req_ids, cached.num_computed_tokens, strict=True
        ):
            if request_id in cached.resumed_req_ids:
                self._place(request_id, orders.placed.get(request_id), num_computed)
        self._orders = orders
        self.on_step(scheduler_output)
        return super().execute_model(scheduler_output, non_block)

    def _end(self, request_id: str, orders: StepOrders) -> None:
        copy = self.copies.pop(request_id, None)
        kept = orders.kept.get(request_id)
        if kept is not None:
            assert copy is not None and len(copy.states) >= len(kept.tokens)
            self.contexts[kept.context_id] = HostContext(
                kept.context_id,
                kept.tokens,
                copy.begin,
                copy.states[copy.begin : len(kept.tokens)],
                copy.context,
            )

    def _take(self, new: NewRequestData) -> None:
        if new.req_id not in self.copies:
            assert new.prompt_token_ids is not None
            self.copies[new.req_id] = HostCopy(len(new.prompt_token_ids))

    def _place(
        self, request_id: str, placement: Placement | None, num_computed_tokens: int
    ) -> None:
        copy = self.copies[request_id]
        copy.first_resident_token = 0
        if placement is None:
            copy.drop()
            return
        self.placements.append((request_id, placement))
        if placement.context_id is not None:
            copy.context, copy.begin = self.contexts[placement.context_id], placement.num_tokens
            copy.states = copy.context.states[: copy.begin]
        assert placement.num_tokens == num_computed_tokens <= len(copy.states)
        last_block = placement.num_tokens // BLOCK_SIZE
        assert placement.first_resident_token == last_block * BLOCK_SIZE
        copy.first_resident_token = placement.first_resident_token

    def _write(self, request_id: str, start: int, end: int) -> None:
        sequence, copy = self._sequences[request_id], self.copies[request_id]
        (ids,), (memory,) = sequence.block_ids, self._memory
        assert all(ids[start // BLOCK_SIZE : -(-end // BLOCK_SIZE)]), "there is no block to write"
        super()._write(request_id, start, end)
        first = copy.first_resident_token
        if request_id in self._orders.placed:
            # the block in whose middle the request begins gets its first tokens from the host
            assert not any(ids[: first // BLOCK_SIZE]) and start - first < BLOCK_SIZE
            slots = self._slots(sequence, 0, first, start)
            assert 0 not in slots // BLOCK_SIZE
            memory.reshape(-1)[slots] = copy.states[first:start]

    def _read(self, request_id: str, start: int, end: int) -> None:
        sequence, copy = self._sequences[request_id], self.copies[request_id]
        (memory,) = self._memory
        # all of a step is written before: blocks of others may be hit while they are computed
        if self.spec.policy.mirrors(end, copy.num_prompt_tokens):
            missing = self._slots(sequence, 0, len(copy.states), start)
            assert 0 not in missing // BLOCK_SIZE, "a token left before the host had a copy"
            copy.states[len(copy.states) :] = memory.reshape(-1)[missing].tolist()
            copy.states[start:] = sequence.text.states[start:end]
        begin, window_begin = self.spec.policy.residency(
            start, copy.num_prompt_tokens, copy.first_resident_token
        )
        self._read_range(request_id, 0, 0, begin)
        self._read_range(request_id, 0, window_begin, end)
        assert copy.states[begin:window_begin] == sequence.text.states[begin:window_begin], (
            f"request {request_id} reads other tokens than {begin} to {window_begin} of the "
            f"{len(copy.states)} that the host has"
        )
        self.reads_from_host += window_begin - begin


@dataclass
class LongEngine:
    """An engine whose answers are compared with the only right ones."""

    engine: LLMEngine
    prompts: dict[str, list[int]] = field(default_factory=dict)
    output_tokens: dict[str, int] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)

    @property
    def scheduler(self) -> Any:
        return self.engine.engine_core.engine_core.scheduler

    @property
    def executor(self) -> LongContextExecutor:
        return self.engine.engine_core.engine_core.model_executor

    @property
    def long_contexts(self) -> Any:
        return self.scheduler.relay_long_contexts

    def add(
        self, request_id: str, prompt: list[int], output_tokens: int, *, keep: bool = False
    ) -> None:
        self.prompts[request_id] = prompt
        self.output_tokens[request_id] = output_tokens
        params = SamplingParams(
            temperature=0,
            max_tokens=output_tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args={KEEP_ARG: True} if keep else None,
        )
        self.engine.add_request(request_id, {"prompt_token_ids": prompt}, params)

    def keep(self, request_id: str, prompt: list[int]) -> str:
        """A context of a request that ends now; its id."""
        self.add(request_id, prompt, 1, keep=True)
        self.run()
        [report] = self.long_contexts.contexts.pending()
        return report.context_id

    def abort(self, request_id: str) -> None:
        self.engine.abort_request([request_id])
        del self.prompts[request_id]

    def step(self) -> None:
        for output in self.engine.step():
            if output.finished and output.request_id in self.prompts:
                question = Question(0, None, None, self.output_tokens[output.request_id])
                wanted = answer(question, self.prompts.pop(output.request_id), ())
                assert list(output.outputs[0].token_ids) == wanted
                self.ended.append(output.request_id)

    def run(self, max_steps: int = 1000) -> None:
        """Until all requests have ended."""
        for _ in range(max_steps):
            if not self.engine.has_unfinished_requests():
                return
            self.step()
        waiting = [request.request_id for request in self.scheduler.waiting]
        raise AssertionError(f"{max_steps} steps were not enough: {waiting} wait")

    def status(self, request_id: str) -> RequestStatus:
        return self._request(request_id).status

    def num_computed_tokens(self, request_id: str) -> int:
        return self._request(request_id).num_computed_tokens

    def _request(self, request_id: str) -> Any:
        """The engine adds something to the ids it is given."""
        requests = self.scheduler.requests
        (found,) = [each for each in requests if each.split("-")[0] == request_id]
        return requests[found]


@contextmanager
def long_engine(
    model: str,
    *,
    num_blocks: int = 40,
    host_tokens: int = 4 * MAX_MODEL_LEN_TOKENS,
    asynchronous: bool = False,
    relay: dict[str, Any] | None = None,
    **engine_args: Any,
) -> Iterator[LongEngine]:
    """
    Args:
        host_tokens: for which there is host memory.
    """
    options: dict[str, Any] = WINDOW | (relay or {})
    options["host_memory_gib"] = (host_tokens * BYTES_PER_TOKEN + 0.5) / (1 << 30)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_memory, "GRANULE_TOKENS", GRANULE_TOKENS)
        try:
            engine = start(
                model,
                asynchronous=asynchronous,
                executor_class=LongContextExecutor,
                attention_backend="RELAY_SPARSE",
                num_gpu_blocks_override=num_blocks,
                additional_config={"relay": options},
                **engine_args,
            )
            try:
                yield LongEngine(engine)
            finally:
                engine.engine_core.shutdown()
        finally:
            cleanup_dist_env_and_memory()

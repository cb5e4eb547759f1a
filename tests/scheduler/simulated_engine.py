# SPDX-License-Identifier: Apache-2.0
"""vLLM's engine with a simulated worker: tokens are a function of the text before them, and the
memory of the KV cache shows whether every block still holds what its request needs.

A worker runs batches in the order in which they are dispatched, so it may do so at once: with
asynchronous scheduling the engine core asks for the result a step later.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from vllm import EngineArgs, LLMEngine
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.usage.usage_lib import UsageContext
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput

from tests.integration.tiny_models import MAX_MODEL_LEN_TOKENS, VOCAB_SIZE
from tests.scheduler.soak import Question
from vllm_relay.modules.prompt.plan import ModulePlan, plan_of
from vllm_relay.prefix_cache.predict.executor import StubExecutor

MODULUS = (1 << 31) - 1


class Text:
    """Tokens, and for each a state that tells all tokens up to it, the salt and the adapter.

    Attributes:
        unseen: places of tokens that the last one does not see.
        num_given: how many of the first tokens others compute.
    """

    unseen: frozenset[int] = frozenset()
    num_given = 0

    def __init__(self, salt: str | None, adapter: LoRARequest | None, tokens: list[int]) -> None:
        self._state = 1 + sum((salt or "").encode())
        self._state += 1000 * adapter.lora_int_id if adapter else 0
        self.states: list[int] = []
        for token in tokens:
            self.append(token)

    def __len__(self) -> int:
        return len(self.states)

    def append(self, token: int) -> None:
        self._state = (self._state * 1_000_003 + token + 1) % MODULUS
        self.states.append(self._state)

    @property
    def next_token(self) -> int:
        return 3 + self._state % (VOCAB_SIZE - 3)


def answer(
    question: Question,
    prompt: list[int],
    stop_token_ids: tuple[int, ...],
    plan: ModulePlan | None = None,
) -> list[int]:
    kind = Text if plan is None else partial(ModularText, plan)
    text, made = kind(question.salt, question.adapter, prompt), []
    while len(made) < question.output_tokens and not (made and made[-1] in stop_token_ids):
        made.append(text.next_token)
        text.append(made[-1])
    return made


class ModularText(Text):
    """Of a request with a plan: the state of a token tells what it sees, and its position."""

    def __init__(
        self, plan: ModulePlan, salt: str | None, adapter: LoRARequest | None, tokens: list[int]
    ) -> None:
        super().__init__(salt, adapter, [])
        first_state = self._state
        self.num_given = plan.num_stored_slots
        self.unseen = frozenset(
            slot for begin, end in plan.last_hidden_slots for slot in range(begin, end)
        )
        for place, segment in enumerate(plan.segments):
            content = plan.segment_tokens(place, tokens)
            seen = tuple(
                self.states[plan.first_slots[index] + offset]
                for index, num_visible in segment.context
                for offset in range(num_visible)
                if not _is_in(offset, plan.segments[index].placeholders)
            )
            self._state = hash((first_state, seen)) % MODULUS
            for token, position in zip(content, segment.positions(len(content)), strict=True):
                self._append(token, position)
            self.states += [0] * (plan.num_slots(segment) - segment.num_tokens)
        self._state, self._next_position, self._seen = first_state, 0, 0
        visible = [0] * len(plan.segments)
        for run in plan.tail:
            for index, num_tokens in run.sees:
                visible[index] = num_tokens
            hidden = {
                slot for begin, end in plan.hidden_slots(visible) for slot in range(begin, end)
            }
            stored = (each for each in range(plan.num_stored_slots) if each not in hidden)
            self._seen = hash(tuple(self.states[slot] for slot in stored))
            self._next_position = run.position
            for _ in range(run.num_tokens):
                self.append(tokens[len(self)])
        if plan.tail:
            for token in tokens[len(self) :]:
                self.append(token)

    def append(self, token: int) -> None:
        self._append(token, self._next_position, self._seen)
        self._next_position += 1

    def _append(self, token: int, position: int, seen: int = 0) -> None:
        self._state = hash((self._state, token, position, seen)) % MODULUS
        self.states.append(self._state)


def _is_in(offset: int, ranges: tuple[tuple[int, int], ...]) -> bool:
    return any(begin <= offset < end for begin, end in ranges)


@dataclass
class _Sequence:
    """What a worker keeps about a request."""

    make_text: Callable[[list[int]], Text]
    text: Text
    block_ids: tuple[list[int], ...]


class SimulatedExecutor(StubExecutor):
    """Writes and reads KV memory, of which it keeps one number per token."""

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> Any:
        (config,) = kv_cache_configs
        self._sequences: dict[str, _Sequence] = {}
        specs = [group.kv_cache_spec for group in config.kv_cache_groups]
        self._windows = [getattr(spec, "sliding_window", None) or 1 << 30 for spec in specs]
        self._memory = [
            np.full((config.num_blocks, spec.block_size), -1, dtype=np.int64) for spec in specs
        ]
        return super().initialize_from_config(kv_cache_configs)

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        for request_id in scheduler_output.finished_req_ids:
            self._sequences.pop(request_id, None)
        starts: dict[str, int] = {}
        for new in scheduler_output.scheduled_new_reqs:
            self._begin(new)
            starts[new.req_id] = new.num_computed_tokens
        starts |= self._go_on(scheduler_output.scheduled_cached_reqs)
        counts = scheduler_output.num_scheduled_tokens
        assert starts.keys() == counts.keys()
        ends = {request_id: starts[request_id] + counts[request_id] for request_id in starts}
        for request_id, end in ends.items():
            self._write(request_id, starts[request_id], end)
        for request_id, end in ends.items():
            self._read(request_id, starts[request_id], end)
        request_ids = list(counts)
        self._output = ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(request_ids)},
            sampled_token_ids=[self._sample(each, ends[each]) for each in request_ids],
        )
        return _result(None if counts else self._output, non_block)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        return _result(self._output, non_block)

    def _begin(self, new: NewRequestData) -> None:
        assert new.prompt_token_ids is not None
        assert new.sampling_params is not None
        salt = (new.sampling_params.extra_args or {}).get("salt")
        block_ids = tuple(list(ids) for ids in new.block_ids)
        plan = plan_of(new.sampling_params)
        kind = Text if plan is None else partial(ModularText, plan)
        make_text = partial(kind, salt, new.lora_request)
        text = make_text(new.prompt_token_ids)
        self._sequences[new.req_id] = _Sequence(make_text, text, block_ids)

    def _go_on(self, cached: CachedRequestData) -> dict[str, int]:
        """Returns how many tokens of each request have been computed."""
        for request_id, new_block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            sequence = self._sequences[request_id]
            if request_id in cached.resumed_req_ids:
                assert new_block_ids is not None
                sequence.block_ids = tuple(list(ids) for ids in new_block_ids)
            elif new_block_ids is not None:
                for ids, new_ids in zip(sequence.block_ids, new_block_ids, strict=True):
                    ids.extend(new_ids)
            if request_id in cached.all_token_ids:
                tokens = cached.all_token_ids[request_id]
                sequence.text = sequence.make_text(tokens)
        return dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))

    def _slots(self, sequence: _Sequence, group: int, start: int, end: int) -> Any:
        block_size = self._memory[group].shape[1]
        positions = np.arange(start, end)
        blocks = np.array(sequence.block_ids[group])[positions // block_size]
        return blocks * block_size + positions % block_size

    def _write(self, request_id: str, start: int, end: int) -> None:
        sequence = self._sequences[request_id]
        assert end <= len(sequence.text), "a token was scheduled before it was sampled"
        assert start >= sequence.text.num_given, "it computes what others have to"
        for group, memory in enumerate(self._memory):
            slots = self._slots(sequence, group, start, end)
            memory.reshape(-1)[slots] = sequence.text.states[start:end]

    def _read(self, request_id: str, start: int, end: int) -> None:
        """What the queries from `start` on need."""
        for group, window in enumerate(self._windows):
            self._read_range(request_id, group, max(0, end - window), end)

    def _read_range(self, request_id: str, group: int, begin: int, end: int) -> None:
        sequence, memory = self._sequences[request_id], self._memory[group]
        found = memory.reshape(-1)[self._slots(sequence, group, begin, end)]
        unseen = sequence.text.unseen
        wrong = np.flatnonzero(found != sequence.text.states[begin:end])
        wrong = np.array([each for each in wrong if begin + each not in unseen])
        assert not wrong.size, (
            f"request {request_id} reads the KV of another text in group {group}, at "
            f"{wrong.size} of the positions {begin} to {end}, first at {begin + wrong[0]}"
        )

    def _sample(self, request_id: str, end: int) -> list[int]:
        text = self._sequences[request_id].text
        if end < len(text):
            return []
        token = text.next_token
        text.append(token)
        return [token]


def _result(value: Any, non_block: bool) -> Any:
    if not non_block:
        return value
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def start(
    model: str,
    *,
    asynchronous: bool,
    available_bytes: int = 1 << 28,
    executor_class: type[SimulatedExecutor] = SimulatedExecutor,
    **engine_args: Any,
) -> LLMEngine:
    """An engine of an online kind, in this process."""
    args = {
        "model": model,
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": 32,
        "max_model_len": MAX_MODEL_LEN_TOKENS,
        "max_num_batched_tokens": 96,
        "max_num_seqs": 12,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        **engine_args,
    }
    config: VllmConfig = EngineArgs(**args).create_engine_config(UsageContext.ENGINE_CONTEXT)
    # vLLM's platform for CPUs turns it off, for its worker
    config.scheduler_config.async_scheduling = asynchronous
    executor: Callable[..., Any] = partial(executor_class, available_bytes=available_bytes)
    return LLMEngine(config, executor, log_stats=True)

# SPDX-License-Identifier: Apache-2.0
"""An engine without a model that keeps contexts: vLLM's KV cache manager, the scheduler's side of
long contexts, and a list of contexts for each worker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.v1.request import RequestStatus

from tests.long_context.kv_cache_managers import MAX_MODEL_LEN, Blocks, spec_of
from vllm_relay.commands.engine import run
from vllm_relay.long_context import commands
from vllm_relay.long_context.orders import ContextReport, StepOrders
from vllm_relay.long_context.scheduling.scheduler import LongContextScheduler

CHUNK_TOKENS = 30
GRANULE_BYTES = 1024 * (2 * 16 * 4 + 64 + 1)
"""Of keys, values, codes and means: a request of up to 1024 tokens, and so any that fits."""
FILE_BYTES = 5000


class Worker:
    """One rank: what it has of contexts, by id."""

    def __init__(self, *, has_folder: bool) -> None:
        self.contexts: dict[str, tuple[ContextReport, np.ndarray]] = {}
        self.num_opened = 1
        self.deletion_problem: str | None = None
        """Why no file can be deleted."""
        self._has_folder = has_folder

    def obey(self, orders: StepOrders) -> None:
        for context_id in orders.deleted:
            del self.contexts[context_id]
        for kept in orders.kept.values():
            num_tokens = len(kept.tokens)
            report = ContextReport(
                kept.context_id, num_tokens, "indexing", GRANULE_BYTES, 0, num_own_tokens=num_tokens
            )
            self.contexts[kept.context_id] = (report, np.array(kept.tokens))

    def delete(self, context_id: str) -> str | None:
        if self.deletion_problem is None:
            self.contexts.pop(context_id, None)
        elif context_id in self.contexts:
            report, tokens = self.contexts[context_id]
            report = replace(report, problem=self.deletion_problem)
            self.contexts[context_id] = report, tokens
        return self.deletion_problem

    def fail_to_write(self) -> None:
        """The file of any context that was to be written."""
        for context_id, (report, tokens) in self.contexts.items():
            failed = replace(report, state="memory", problem="OSError: no space")
            self.contexts[context_id] = failed, tokens

    def build_indexes(self, file_bytes: int = FILE_BYTES) -> list[ContextReport]:
        """Of all contexts that wait for it; their reports."""
        changed = []
        for context_id, (report, tokens) in self.contexts.items():
            if report.state == "indexing":
                stored = {"state": "stored", "memory_bytes": 0, "file_bytes": file_bytes}
                done = stored if self._has_folder else {"state": "memory"}
                changed.append(replace(report, **done))
                self.contexts[context_id] = (changed[-1], tokens)
        return changed


class EngineCore:
    """What commands need of vLLM's. Requests run to their end at once."""

    def __init__(self, blocks: Blocks, vllm_config: Any, num_ranks: int, has_folder: bool) -> None:
        self.blocks = blocks
        self.workers = [Worker(has_folder=has_folder) for _ in range(num_ranks)]
        self.long_contexts = LongContextScheduler(
            SimpleNamespace(
                vllm_config=vllm_config,
                kv_cache_manager=blocks.manager,
                max_model_len=MAX_MODEL_LEN,
            )
        )
        self.scheduler: Any = SimpleNamespace(
            relay_long_contexts=self.long_contexts,
            get_num_unfinished_requests=lambda: int(self.is_busy),
            has_finished_requests=lambda: self.has_finished,
        )
        self.model_executor = self
        self.has_finished = False
        self.is_busy = False
        self.sent_tokens: list[str] = []
        """Contexts whose tokens the workers have sent."""

    def run(self, token_ids: list[int], params: Any, status: RequestStatus) -> int:
        """Returns how many tokens were computed before."""
        request = self.blocks.request(token_ids)
        request.sampling_params = params
        num_cached = self.blocks.begin(request, CHUNK_TOKENS)
        assert num_cached is not None
        self.blocks.run(request, CHUNK_TOKENS)
        request.status = status
        self.long_contexts.before_free(request)
        self.blocks.manager.free(request)
        self.has_finished = True
        return num_cached

    def step_fn(self) -> None:
        """A step, which may have nothing to compute: the workers are told what has ended."""
        orders = self.long_contexts.take_orders()
        for worker in self.workers:
            worker.obey(orders)
        self.has_finished = False

    def collective_rpc(self, method: Any, args: tuple[Any, ...]) -> list[Any]:
        if method is commands._reports_of_worker:
            (reopen,) = args
            for worker in self.workers:
                worker.num_opened += reopen
            return [[report for report, _ in each.contexts.values()] for each in self.workers]
        if method is commands._tokens_in_worker:
            (context_ids,) = args
            self.sent_tokens += context_ids
            return [
                {each: worker.contexts[each][1] for each in context_ids} for worker in self.workers
            ]
        assert method is commands._delete_in_worker
        return [worker.delete(*args) for worker in self.workers]


class Renderer:
    """A letter is a token."""

    tokenizer = object()
    default_chat_tok_params = SimpleNamespace(with_kwargs=lambda **kwargs: None)

    def render_cmpl(self, prompts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            {"prompt_token_ids": prompt.get("prompt_token_ids") or letters(prompt["prompt"])}
            for prompt in prompts
        ]

    async def render_cmpl_async(self, prompts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return self.render_cmpl(prompts)

    def render_chat(self, conversations: Any, *params: Any) -> Any:
        return conversations, [{"prompt_token_ids": chat(each)} for each in conversations]


class OnlineRenderer:
    chat_template = "a template"
    renderer = Renderer()

    async def render_chat(self, request: Any) -> Any:
        if request.messages[0]["role"] == "tool":
            raise ValueError("no tools here")
        return [], [{"prompt_token_ids": chat(request.messages)}]


class Engine:
    """An LLMEngine and an AsyncLLM in one, whose engine core is elsewhere.

    Args:
        backend: of attention.
        host_granules: host memory, for so many requests or contexts.
        options: of relay.
    """

    def __init__(
        self,
        *,
        backend: str = "RELAY_SPARSE",
        engines: int = 1,
        num_ranks: int = 1,
        enable_caching: bool = True,
        host_granules: int = 8,
        **options: Any,
    ) -> None:
        options["host_memory_gib"] = (host_granules * GRANULE_BYTES * num_ranks + 0.5) / (1 << 30)
        self.vllm_config = SimpleNamespace(
            additional_config={"relay": options},
            attention_config=SimpleNamespace(
                backend=SimpleNamespace(name=backend), backend_per_kind={}
            ),
            speculative_config=None,
            parallel_config=SimpleNamespace(
                data_parallel_size=engines, tensor_parallel_size=num_ranks
            ),
        )
        blocks = Blocks(spec_of(), 120, enable_caching)
        self.core = EngineCore(blocks, self.vllm_config, num_ranks, "context_dir" in options)
        self.engine_core = self
        self.renderer = Renderer()
        self.status = RequestStatus.FINISHED_LENGTH_CAPPED
        self.prompts: list[list[int]] = []
        """Of the requests so far."""
        self.fails: Exception | None = None
        self._waiting: list[tuple[list[int], Any]] = []

    def call_utility(self, method: str, *args: Any) -> Any:
        assert method == "relay_command"
        return run(commands.COMMANDS, self.core, *args)

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        return self.call_utility(method, *args)

    def add_request(self, request_id: str, prompt: Any, params: Any) -> None:
        if self.fails is not None:
            raise self.fails
        self._waiting.append((prompt["prompt_token_ids"], params))

    def has_unfinished_requests(self) -> bool:
        return bool(self._waiting)

    def step(self) -> None:
        token_ids, params = self._waiting.pop(0)
        self.prompts.append(token_ids)
        self.core.run(token_ids, params, self.status)

    async def generate(
        self, prompt: Any, params: Any, request_id: str, data_parallel_rank: int | None = None
    ) -> AsyncIterator[None]:
        self.add_request(request_id, prompt, params)
        self.step()
        yield None

    def ask(self, token_ids: Sequence[int]) -> int:
        """Runs a request that is not kept; returns how many of its tokens were there already."""
        return self.core.run(
            list(token_ids),
            SimpleNamespace(max_tokens=1, extra_args=None, skip_reading_prefix_cache=False),
            RequestStatus.FINISHED_STOPPED,
        )


def letters(text: str) -> list[int]:
    return list(map(ord, text))


def chat(messages: Any) -> list[int]:
    return letters("".join(f"<{each['role']}>{each['content']}" for each in messages))


def tokens(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))

# SPDX-License-Identifier: Apache-2.0
"""Random arrivals, aborts, kept, reused and deleted contexts and resets, on an engine of long
contexts in this process, with so little memory that requests are preempted and wait."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm import EngineArgs, LLMEngine, SamplingParams

from tests.long_context.recall_prompts import OUTPUT_TOKENS, Question, any_text, ask
from vllm_relay.commands.errors import CommandError
from vllm_relay.long_context.client import (
    Context,
    delete_context,
    keep_context,
    list_contexts,
)
from vllm_relay.long_context.host.worker import make_worker
from vllm_relay.long_context.orders import KEEP_ARG, StepOrders
from vllm_relay.sparse.contexts.disk.context_file import (
    CONTEXT_SUFFIX,
    LINK_SUFFIX,
    QUERIES_SUFFIX,
    ContextFile,
)
from vllm_relay.sparse.contexts.disk.context_folder import parent_path

SECONDS = float(os.environ.get("RELAY_SOAK_S", "60"))
FIRST_SEED = int(os.environ.get("RELAY_SOAK_FIRST_SEED", "0"))

MAX_MODEL_LEN_TOKENS = 1536
MAX_OUTSTANDING = 24
MAX_REMEMBERED_TEXTS = 20
STUCK_S, SETTLING_S = 120.0, 20.0
GIB = 1 << 30
HOST_MEMORY_BYTES = 6 * 1024 * 2560  # six granules; the longest request takes two
DISK_BYTES = 12_000_000

COUNTS = (
    "requests", "finished", "aborted", "steps", "wrong", "lost",
    "preempted", "resumed", "memory_taken", "memory_waits",
    "kept", "refused", "reused", "reused_within_block", "stored", "deleted", "evicted",
    "contexts_lost", "resets", "resets_with_requests",
)  # fmt: skip

OnEvent = Callable[[str, str], None]


def start_engine(model: str, folder: Path) -> LLMEngine:
    options = {
        "min_context_tokens": 96,
        "sink_tokens": 20,
        "window_tokens": 40,
        "host_memory_gib": HOST_MEMORY_BYTES / GIB,
        "context_dir": str(folder),
        "context_disk_gib": DISK_BYTES / GIB,
    }
    args = EngineArgs(
        model=model,
        attention_backend="relay_sparse",
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=32,
        max_model_len=MAX_MODEL_LEN_TOKENS,
        max_num_batched_tokens=160,  # most prompts are longer: they are prefilled in chunks
        max_num_seqs=12,
        num_gpu_blocks_override=24,
        enable_prefix_caching=True,
        disable_log_stats=False,
        seed=0,
        additional_config={"relay": options},
    )
    return LLMEngine.from_engine_args(args)


@dataclass
class Soak:
    """Does one random thing per step.

    Args:
        engine: in this process.
        on_event: is told of each context that is "kept", found to be "stored", "deleting" and
            "deleted" by a client, or "evicting", with its id; "kept", "deleting" and "evicting"
            before a file changes, the others afterwards.

    Attributes:
        wrong: what was asked and answered, for each answer that was not right.
    """

    engine: LLMEngine
    folder: Path
    seed: int
    on_event: OnEvent = lambda kind, context_id: None
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        core: Any = self.engine.engine_core
        self.scheduler = core.engine_core.scheduler
        self.long_contexts = self.scheduler.relay_long_contexts
        self.worker = make_worker(self.engine.vllm_config)  # in the same process
        self.rng = random.Random(self.seed)
        self.counts = dict.fromkeys(COUNTS, 0)
        self.outstanding: dict[str, Question] = {}
        self.kept_texts: list[list[int]] = []
        self.deleted: set[str] = set()
        self._stored: set[str] = set()
        self._left: set[str] = set()
        self._last_output_s = time.monotonic()
        self._watch(self.long_contexts)

    def _watch(self, long_contexts: Any) -> None:
        """Counts what the scheduler decides."""
        take_orders, keep = long_contexts.take_orders, long_contexts.contexts.keep
        restart, reserve = long_contexts.restart, long_contexts.memory.reserve
        take_evicted = long_contexts.contexts.take_evicted

        def leave(context_ids: list[str]) -> None:
            for context_id in context_ids:
                self.counts["evicted"] += 1
                self._left.add(context_id)
                self.on_event("evicting", context_id)

        def watched_take_orders() -> StepOrders:
            orders = take_orders()
            size = self.scheduler.cache_config.block_size
            for placement in orders.placed.values():
                if placement.context_id is None:
                    self.counts["resumed"] += 1
                else:
                    self.counts["reused"] += 1
                    self.counts["reused_within_block"] += placement.num_tokens % size != 0
            self.counts["memory_taken"] += len(orders.dropped)
            return orders

        def watched_take_evicted() -> list[str]:
            evicted = take_evicted()
            leave(evicted)
            return evicted

        def watched_keep(request: Any, num_tokens: int) -> None:
            keep(request, num_tokens)
            kept = long_contexts.contexts._pending.get(request.request_id)
            if kept is not None:
                self.counts["kept"] += 1
                self.deleted.discard(kept.context_id)
                self._left.discard(kept.context_id)
                self._stored.discard(kept.context_id)
                self.on_event("kept", kept.context_id)

        def watched_restart(scheduler: Any, lost: dict[str, str]) -> None:
            self.counts["contexts_lost"] += len(lost)
            restart(scheduler, lost)

        def watched_reserve(*args: Any) -> list[str] | None:
            dropped = reserve(*args)
            self.counts["memory_waits"] += dropped is None
            return dropped

        long_contexts.take_orders, long_contexts.contexts.keep = watched_take_orders, watched_keep
        long_contexts.restart, long_contexts.memory.reserve = watched_restart, watched_reserve
        long_contexts.contexts.take_evicted = watched_take_evicted

    def add(self, question: Question | None = None, *, is_kept: bool | None = None) -> None:
        """A question: a random one about a document, or about what was kept."""
        if question is None:
            output_tokens = self.rng.randint(1, OUTPUT_TOKENS)
            text = any_text(self.rng)
            if self.kept_texts and self.rng.random() < 0.25:
                text = self.rng.choice(self.kept_texts)
            question = ask(self.rng, text, output_tokens)
        if is_kept is None:
            is_kept = self.rng.random() < 0.15
        request_id = f"{self.seed}-{self.counts['requests']}"
        self.counts["requests"] += 1
        self.engine.add_request(
            request_id,
            {"prompt_token_ids": question.prompt},
            SamplingParams(
                temperature=0,
                max_tokens=len(question.answer),
                ignore_eos=True,
                detokenize=False,
                extra_args={KEEP_ARG: True} if is_kept else None,
            ),
        )
        self.outstanding[request_id] = question
        if is_kept:
            text = [*question.prompt, *question.answer]
            # a follow-up question has room for its answer
            if len(text) < MAX_MODEL_LEN_TOKENS - 2 * OUTPUT_TOKENS:
                self.kept_texts = [*self.kept_texts, text][-MAX_REMEMBERED_TEXTS:]

    def abort(self) -> None:
        request_id = self.rng.choice(sorted(self.outstanding))
        self.engine.abort_request([request_id])
        del self.outstanding[request_id]
        self.counts["aborted"] += 1

    def delete(self) -> None:
        known = sorted(self.long_contexts.contexts.catalog, key=lambda each: each.last_use)
        if known:
            context_id = self.rng.choice(known).id
            self.on_event("deleting", context_id)
            delete_context(self.engine, context_id)
            self.deleted.add(context_id)
            self._stored.discard(context_id)
            self.counts["deleted"] += 1
            self.on_event("deleted", context_id)

    def reset(self) -> None:
        with_requests = self.rng.random() < 0.5
        core: Any = self.engine.engine_core
        core.engine_core.reset_prefix_cache(reset_running_requests=with_requests)
        self.counts["resets_with_requests" if with_requests else "resets"] += 1

    def keep(self) -> None:
        """A document, when all questions are answered."""
        self.drain()
        document = any_text(self.rng)
        try:
            context = keep_context(self.engine, document)
            assert context.num_tokens == len(document)
        except CommandError as error:
            assert error.status in (400, 507), error  # too short; no host memory is left
            self.counts["refused"] += 1

    def contexts(self) -> list[Context]:
        """Those there are."""
        listed = list_contexts(self.engine)
        for context in listed:
            assert context.problem is None, context
            assert context.context_id not in self.deleted, f"deleted, and there again: {context}"
            if context.state == "stored" and context.context_id not in self._stored:
                self._stored.add(context.context_id)
                self.counts["stored"] += 1
                self.on_event("stored", context.context_id)
        return listed

    def step(self) -> None:
        self.counts["steps"] += 1
        for output in self.engine.step():
            self._last_output_s = time.monotonic()
            question = self.outstanding[output.request_id]
            tokens = list(output.outputs[0].token_ids)
            expected = question.answer if output.finished else question.answer[: len(tokens)]
            if output.finished:
                del self.outstanding[output.request_id]
                self.counts["finished"] += 1
            if tokens != expected:
                self.counts["wrong"] += 1
                self.wrong.append(
                    f"{output.request_id}, a prompt of {len(question.prompt)} tokens of which "
                    f"{output.num_cached_tokens} were there: {tokens}, expected {expected}"
                )

    def act(self) -> None:
        chance = self.rng.random()
        if chance < 0.4 and len(self.outstanding) < MAX_OUTSTANDING:
            for _ in range(self.rng.choice((1, 1, 2, 8))):
                self.add()
        elif chance < 0.42 and self.outstanding:
            self.abort()
        elif chance < 0.432:
            self.delete()
        elif chance < 0.49:
            self.contexts()
        elif chance < 0.502:
            self.reset()
        elif chance < 0.51:
            self.keep()
        if self.engine.has_unfinished_requests():
            self.step()

    def run_while(self, goes_on: Callable[[], bool]) -> None:
        while goes_on():
            self.act()
        self.drain()

    def drain(self) -> None:
        """Raises AssertionError: no request has got a token for `STUCK_S`."""
        self._last_output_s = time.monotonic()
        while self.engine.has_unfinished_requests():
            self.step()
            if time.monotonic() - self._last_output_s > STUCK_S:
                self.counts["lost"] += len(self.outstanding)
                raise AssertionError(f"stuck: {self.counts}, {self.long_contexts.memory.__dict__}")
        self.counts["lost"] += len(self.outstanding)
        assert not self.outstanding, f"never finished: {sorted(self.outstanding)}"

    def ask_about_contexts(self, expected: Iterable[str]) -> int:
        """What a new engine finds in its folder is what was stored, and can be asked.

        Returns:
            how many contexts were asked about.
        """
        found = {each.context_id for each in self.contexts()}
        missing = set(expected) - found - self._left  # the folder may be too full
        assert not missing, f"stored, and not found: {missing}"
        assert self.worker.contexts is not None
        before = self.counts["reused"]
        asked = 0
        for report, tokens in self.worker.contexts.reports():
            if report.context_id in self.long_contexts.contexts.catalog:
                text = tokens[: MAX_MODEL_LEN_TOKENS - 2 * OUTPUT_TOKENS].tolist()
                question = ask(self.rng, text, self.rng.randint(1, OUTPUT_TOKENS))
                self.add(question, is_kept=False)
                self.drain()
                asked += 1
        # a follow-up finds what the one before has left on the device, if that is as long
        assert self.counts["reused"] > before or not asked, "contexts were not reused"
        return asked

    def check_nothing_is_left(self) -> None:
        """Raises AssertionError: something was lost, or was not given back."""
        assert not self.outstanding
        assert self.counts["requests"] == self.counts["finished"] + self.counts["aborted"]
        while any(each.state == "indexing" for each in self.contexts()):
            time.sleep(0.05)
        assert self.engine.reset_prefix_cache()
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        assert len(self.scheduler.waiting) == 0
        assert self.long_contexts.memory.used_bytes == 0
        assert not self.long_contexts._preempted
        assert not self.worker.requests
        # threads of stores that a reset has closed may still write
        end_s = time.monotonic() + SETTLING_S
        while (problem := self._folder_problem()) is not None:
            assert time.monotonic() < end_s, problem
            time.sleep(0.1)

    def _continued(self, paths: list[Path]) -> set[str]:
        """Ids of what these files continue, at any distance."""
        found: set[str] = set()
        while paths:
            with ContextFile.open(paths.pop()) as file:
                parent = file.parent
            if parent is not None and parent.context_id not in found:
                found.add(parent.context_id)
                paths.append(parent_path(self.folder, parent.context_id))
        return found

    def _folder_problem(self) -> str | None:
        """What is in the folder that should not be there."""
        self.contexts()
        self.add(is_kept=False)
        self.drain()
        files = {path.stem: path for path in self.folder.glob(f"*{CONTEXT_SUFFIX}")}
        num_bytes = sum(path.stat().st_size for path in files.values())
        if num_bytes > DISK_BYTES:
            return f"{num_bytes} bytes, expected at most {DISK_BYTES}"
        continued = self._continued([*files.values()])
        for path in self.folder.iterdir():
            if path.suffix == LINK_SUFFIX and path.stem in continued:
                continue
            if path.suffix not in (CONTEXT_SUFFIX, QUERIES_SUFFIX):
                return f"{path.name}: no context"
            if path.stem not in files:
                return f"{path.name}: of a context that is gone"
        return None

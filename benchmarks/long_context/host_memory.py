# SPDX-License-Identifier: Apache-2.0
"""What a process takes beside what it had at most before its first long request, against
`host_memory_gib`."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import psutil

from benchmarks.support.formatting import Row
from benchmarks.support.model import Model

MIB = 1 << 20
MODEL = Model(
    hidden_size=1024, intermediate_size=256, num_heads=8, num_kv_heads=8, num_layers=8,
    vocab_size=512,
)  # fmt: skip
OPTIONS = {"min_context_tokens": 1024}
"""So that requests need not be long to be long ones."""
SAMPLE_EVERY_S = 0.002


class PeakMemory:
    """The most that this process has in memory while it is watched."""

    def __init__(self) -> None:
        self._process, self._ended = psutil.Process(), threading.Event()
        self.peak_bytes = 0
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def now_bytes(self) -> int:
        return int(self._process.memory_info().rss)

    def __enter__(self) -> PeakMemory:
        self._watcher.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._watcher.join()

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLE_EVERY_S):
            self.peak_bytes = max(self.peak_bytes, self.now_bytes())


@dataclass
class Load:
    """How much is asked for.

    Attributes:
        limit_mib: `host_memory_gib`, in MiB.
        num_requests: that take memory for as many as fit, of `request_tokens` each.
        num_contexts: that are kept while others are read, of `context_tokens` each.
    """

    limit_mib: int = 384
    num_requests: int = 6
    request_tokens: int = 2_900
    num_contexts: int = 5
    context_tokens: int = 2_000
    output_tokens: int = 16

    @property
    def max_model_len(self) -> int:
        return max(self.request_tokens, self.context_tokens) + 4 * self.output_tokens


SMOKE_LOAD = Load(
    limit_mib=192, num_requests=2, request_tokens=1_200, num_contexts=2, context_tokens=1_100,
    output_tokens=2,
)  # fmt: skip


class Engine:
    """relay_sparse in this process.

    Attributes:
        base_bytes: the most that the process had while it served short requests, which fill the KV
            cache: what a step of a prompt computes in is part of it.
    """

    def __init__(self, folder: Path, load: Load) -> None:
        from vllm import LLM

        folder.mkdir(parents=True, exist_ok=True)
        self.load = load
        options = OPTIONS | {"host_memory_gib": load.limit_mib / 1024}
        num_blocks = -(-load.max_model_len // 128)
        self.llm = LLM(
            MODEL.save(folder),
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="bfloat16",
            attention_backend="relay_sparse",
            max_model_len=load.max_model_len,
            max_num_seqs=16,
            max_num_batched_tokens=1024,
            num_gpu_blocks_override=num_blocks + 1,  # and vLLM's null block
            block_size=128,
            enforce_eager=True,
            disable_log_stats=False,
            seed=0,
            additional_config={"relay": options},
        )
        self.engine = self.llm.llm_engine
        core = self.engine.engine_core.engine_core
        self.memory = core.scheduler.relay_long_contexts.memory
        self._rng = np.random.default_rng(0)
        for _ in range(-(-num_blocks * 128 // 1000)):
            self.add(1000, 1)
        with PeakMemory() as peak:
            self.run()
        self.base_bytes = peak.peak_bytes

    def add(
        self,
        num_tokens: int,
        output_tokens: int,
        *,
        begin: list[int] | None = None,
        **sampling: Any,
    ) -> list[int]:
        """A request of so many tokens of its own, behind `begin`; its prompt."""
        from benchmarks.support.decoding import add_request, exactly

        own = self._rng.integers(3, MODEL.vocab_size, num_tokens).tolist()
        prompt = [*(begin or []), *own]
        add_request(self.engine, prompt, exactly(output_tokens, **sampling))
        return prompt

    def run(self) -> int:
        """Until all requests have ended; returns the most bytes that were reserved."""
        reserved = 0
        while self.engine.has_unfinished_requests():
            self.engine.step()
            reserved = max(reserved, self.memory.used_bytes)
        return reserved


def requests_only(engine: Engine) -> int:
    """More requests than fit."""
    load = engine.load
    for _ in range(load.num_requests):
        engine.add(load.request_tokens, load.output_tokens)
    return engine.run()


def contexts_and_requests(engine: Engine) -> int:
    """Contexts that are read while their indexes are built, and requests that drive them out."""
    from vllm_relay.long_context.client import list_contexts
    from vllm_relay.long_context.orders import KEEP_ARG

    load, reserved = engine.load, 0
    prompts = []
    for number in range(load.num_contexts):
        keep = {"extra_args": {KEEP_ARG: True}}
        prompts.append(engine.add(load.context_tokens, 1, **keep))
        for begin in prompts[:-1][-2:]:
            engine.add(3, load.output_tokens, begin=begin)
        if number % 3 == 2:
            engine.add(load.request_tokens, load.output_tokens)
        reserved = max(reserved, engine.run())
    while any(each.state == "indexing" for each in list_contexts(engine.llm)):
        time.sleep(0.05)
    reserved = max(reserved, engine.memory.used_bytes)
    for _ in range(load.num_requests):
        engine.add(load.request_tokens, load.output_tokens)
    return max(reserved, engine.run())


def measure(folder: Path, load: Load) -> list[Row]:
    """Tables of what is taken; the process must not have had other engines."""
    engine, rows = Engine(folder, load), []
    for what, run in (
        ("requests", requests_only),
        ("contexts, and requests", contexts_and_requests),
    ):
        with PeakMemory() as peak:
            reserved_bytes = run(engine)
        taken_bytes = peak.peak_bytes - engine.base_bytes
        row: Row = {
            "what": what,
            "limit MiB": load.limit_mib,
            "reserved MiB": reserved_bytes / MIB,
            "taken MiB": taken_bytes / MIB,
            "taken over limit": taken_bytes / (load.limit_mib * MIB),
        }
        rows.append(row)
    return rows

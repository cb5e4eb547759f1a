# SPDX-License-Identifier: Apache-2.0
"""Decode steps of vLLM over a stored context: attention with relay_sparse and dense attention.

A model of Llama-3-8B's attention geometry, cut to two layers, whose queries are those of the head
corpus ("rope"); the context has the corpus's keys and values. relay_sparse: what its attention
takes in steps of a real engine, the device's and the host's part, by its own metrics. dense: the
RELAY kernel over a KV cache with the same tokens, which is all that attention with relay does. Both
run in turn on the same cores. The first token's time is that of a request of which all but the last
token is stored, from the call of generate to its return. Computing is that of a prompt of the same
length that is not stored. Copying is the time to copy the context's keys and values into the KV
cache; what relay_sparse does instead is the attention of the first token over the stored context.
Questions are prompts that go on behind a stored context, attended exactly: "relay" is its kernel in
a prefill of as many tokens, all others of which are in the KV cache already.
First steps are whole steps of an engine in which others decode.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.long_context.corpus_model import (
    HEAD_SIZE,
    Geometry,
    corpus_heads,
    save_model,
    store_context,
)
from benchmarks.long_context.first_steps import (
    CHUNK_TOKENS,
    NUM_OTHERS,
    behind_context,
    computed_by_itself,
)
from benchmarks.long_context.questions import measure_questions
from benchmarks.sparse.heads.corpus import Head
from benchmarks.support.formatting import Row
from benchmarks.support.options import argument_parser, run_as_vllm_worker
from benchmarks.support.result import Goal, Result
from benchmarks.support.timing import Timing, ratio
from vllm_relay.attention_backends.cpu import kernels as cpu
from vllm_relay.attention_backends.plan import plan_step

BLOCK_SIZE_TOKENS = 128
DECODE_TOKENS, FIRST_TOKEN_TOKENS = 131_072, 32_768
SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "alpha 0.01, nothing estimated": {"alpha": 0.01, "estimate_unread": False},
}
DECODE_TITLE = "Attention of a decode step, all layers"
QUESTION_TOKENS, GOAL_QUESTION_TOKENS = [1, 64, 500, 2000], 500
DECODE_GOALS = (9.0, 15.0)
COMPUTE_GOALS, COPY_GOALS = (50.0, 200.0), (10.0, 20.0)
QUESTION_GOALS = (0.8, 1.0)
LONGEST_STEP_GOALS = (0.2, 0.05)


class Engine:
    """relay_sparse in this process, with one stored context."""

    def __init__(
        self,
        geometry: Geometry,
        heads: list[Head],
        num_tokens: int,
        folder: Path,
        relay: dict[str, Any],
    ) -> None:
        from vllm import LLM

        model = save_model(geometry, heads, num_tokens + 1024, folder / "model")
        self.llm = LLM(
            model,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            attention_backend="relay_sparse",
            max_model_len=num_tokens + 1024,
            max_num_batched_tokens=2048,
            max_num_seqs=8,
            block_size=BLOCK_SIZE_TOKENS,
            enforce_eager=True,
            disable_log_stats=False,
            seed=0,
            additional_config={"relay": {"context_dir": str(folder / "contexts"), **relay}},
        )
        rng = np.random.default_rng(0)
        self.tokens = rng.integers(3, geometry.num_queries, num_tokens)
        self.kinds = store_context(self.llm, geometry, heads, self.tokens)

    def decode(self, steps: int, requests: int = 1) -> dict[str, float]:
        """Increases of relay's metrics over the steps, and the seconds of all of them."""
        before, began_s = self._counters(), time.perf_counter()
        prompts = [self.tokens.tolist() + [5 + number] for number in range(requests)]
        outputs = self._generate(prompts, steps)
        took_s = time.perf_counter() - began_s
        cached = {output.num_cached_tokens for output in outputs}
        assert cached == {len(self.tokens)}, f"the context was not reused: {cached}"
        after = self._counters()
        return {name: after[name] - before.get(name, 0) for name in after} | {"total_s": took_s}

    def computed_s(self) -> float:
        """Of a request of the same length that computes all of it."""
        began_s = time.perf_counter()
        [output] = self._generate([[4, *self.tokens[::-1].tolist()]], 1)
        assert output.num_cached_tokens == 0
        return time.perf_counter() - began_s

    def _generate(self, prompts: list[list[int]], steps: int) -> Any:
        from benchmarks.support.decoding import exactly

        return self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], exactly(steps), use_tqdm=False
        )

    def _counters(self) -> dict[str, float]:
        return {
            metric.name: metric.value
            for metric in self.llm.get_metrics()
            if metric.name.startswith("relay:") and hasattr(metric, "value")
        }


class Dense:
    """The RELAY kernel over a KV cache with the tokens of the heads in every layer."""

    def __init__(self, geometry: Geometry, heads: list[Head]) -> None:
        self.geometry, self.num_tokens = geometry, len(heads[0].keys)
        at = [i % len(heads) for i in range(geometry.num_kv_heads)]
        self.keys, self.values = (
            torch.stack([torch.from_numpy(getattr(heads[h], part)) for h in at], 1).bfloat16()
            for part in ("keys", "values")
        )  # [tokens, kv_heads, size]
        num_blocks = -(-self.num_tokens // BLOCK_SIZE_TOKENS)
        shape = (num_blocks, geometry.num_kv_heads, BLOCK_SIZE_TOKENS, 2 * HEAD_SIZE)
        self.caches = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(geometry.num_layers)]
        self.copy()
        queries = np.concatenate([heads[h].queries[0] for h in at])
        self.query = torch.from_numpy(queries).bfloat16()[None]
        self.output = torch.empty_like(self.query)
        self.block_table = torch.arange(num_blocks, dtype=torch.int32)[None]
        self.plan = plan_step(
            self.block_table.numpy(),
            np.array([0, 1], np.int32),
            np.array([self.num_tokens], np.int32),
            block_size=BLOCK_SIZE_TOKENS,
            num_heads=geometry.num_heads,
            num_kv_heads=geometry.num_kv_heads,
            head_size=HEAD_SIZE,
            num_threads=torch.get_num_threads(),
            kernel=cpu.kernel_for(torch.bfloat16),
            forest=None,
        )

    def step(self) -> None:
        """Attention of one decoded token in all layers."""
        for cache in self.caches:
            cpu.relay_attention(
                self.query, cache, self.block_table, self.plan, self.output,
                scale=HEAD_SIZE**-0.5, num_kv_heads=self.geometry.num_kv_heads,
            )  # fmt: skip

    def copy(self) -> None:
        """Keys and values of all tokens into the KV cache."""
        slots = torch.arange(self.num_tokens)
        for cache in self.caches:
            cpu.write_kv_cache(self.keys, self.values, cache, slots)


def seconds_of(call: Any) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


def measure_decode(
    options: argparse.Namespace, num_tokens: int, folder: Path, setting: str
) -> tuple[Row, float]:
    geometry = Geometry()
    heads = corpus_heads(geometry, num_tokens, options.heads)
    engine = Engine(geometry, heads, num_tokens, folder, SETTINGS[setting])
    dense = Dense(geometry, heads)
    engine.decode(2)
    dense.step()
    steps = options.steps
    sparse_s, dense_s, read, shared_s = [], [], 0.0, []
    for _ in range(options.rounds):
        found = engine.decode(steps)
        sparse_s.append((found["relay:host_seconds"] + found["relay:device_seconds"]) / steps)
        read = found["relay:host_retrieved_tokens"] / found["relay:host_searches"]
        dense_s.append(seconds_of(lambda: [dense.step() for _ in range(4)]) / 4)
        found = engine.decode(steps, requests=4)
        shared_s.append((found["relay:host_seconds"] + found["relay:device_seconds"]) / steps)
    value = ratio(Timing(dense_s), Timing(sparse_s))
    row: Row = {
        "context tokens": num_tokens,
        "relay_sparse with": setting,
        "indexes": ", ".join(sorted(set(engine.kinds))),
        "dense ms": Timing(dense_s).median_ms,
        "sparse ms": Timing(sparse_s).median_ms,
        "spread": max(Timing(dense_s).spread, Timing(sparse_s).spread),
        "times as fast": value,
        "tokens a search": read,
        "sparse, 4 requests, ms": Timing(shared_s).median_ms,
    }
    return row, value


def measure_in_a_folder(
    options: argparse.Namespace, num_tokens: int, setting: str
) -> tuple[Row, float]:
    with tempfile.TemporaryDirectory(prefix="relay-bench-") as name:
        return measure_decode(options, num_tokens, Path(name), setting)


def measure_first_token(
    options: argparse.Namespace, num_tokens: int, num_layers: int, folder: Path
) -> tuple[Row, float, float]:
    geometry = Geometry(num_layers=num_layers)
    heads = corpus_heads(geometry, num_tokens, options.heads)
    engine, dense = Engine(geometry, heads, num_tokens, folder, {}), Dense(geometry, heads)
    engine.decode(1)
    reused_s, attention_s, copied_s = [], [], []
    for _ in range(options.rounds):
        found = engine.decode(1)
        reused_s.append(found["total_s"])
        attention_s.append(found["relay:host_seconds"] + found["relay:device_seconds"])
        copied_s.append(seconds_of(dense.copy))
    computed_s = engine.computed_s()
    reused, attention = Timing(reused_s), Timing(attention_s)
    row: Row = {
        "context tokens": num_tokens,
        "layers": num_layers,
        "reused ms": reused.median_ms,
        "of these attention": attention.median_ms,
        "copied ms": Timing(copied_s).median_ms,
        "computed ms": computed_s * 1e3,
        "computed over reused": computed_s / reused.median_s,
        "copied over attention": ratio(Timing(copied_s), attention),
    }
    return row, computed_s / reused.median_s, ratio(Timing(copied_s), attention)


def main() -> None:
    parser = argument_parser(__doc__, rounds=5, threads=2)
    parser.add_argument("--heads", type=int, default=4, help="kv heads with own keys (%(default)s)")
    parser.add_argument("--steps", type=int, default=32, help="per round (%(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="for the first token (%(default)s)")
    parser.add_argument("--questions-only", action="store_true", help="leave the engines out")
    parser.add_argument("--first-steps-only", action="store_true", help="leave all else out")
    parser.add_argument("--lengths", type=int, nargs="+", metavar="TOKENS",
                        help="only decode steps, over contexts of so many tokens")  # fmt: skip
    options = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the context is handed to the worker
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    run_as_vllm_worker(options.threads)
    result = Result.begin(__file__, __doc__, options)
    decode_tokens, first_tokens, layers = DECODE_TOKENS, FIRST_TOKEN_TOKENS, options.layers
    question_tokens = QUESTION_TOKENS
    if options.smoke:
        decode_tokens, first_tokens, layers = 6000, 5000, 2
        options.heads, options.steps, options.rounds = 1, 4, 1
        question_tokens = [1, 70]
    if options.lengths:
        result.add_table(
            DECODE_TITLE,
            [measure_in_a_folder(options, length, "defaults")[0] for length in options.lengths],
        )
        result.end(options)
        return
    if not options.questions_only:
        add_first_steps(result, options, decode_tokens)
    if options.first_steps_only:
        result.end(options)
        return
    if not options.questions_only:
        add_engine_tables(result, options, decode_tokens, first_tokens, layers)
    rows, shares = measure_questions(options, decode_tokens, question_tokens)
    result.add_table("Questions behind a stored context, one layer", rows)
    if GOAL_QUESTION_TOKENS in question_tokens:
        share = shares[question_tokens.index(GOAL_QUESTION_TOKENS)]
        name = f"{GOAL_QUESTION_TOKENS} tokens behind {decode_tokens}: part of relay's rate"
        result.add_goal(Goal(name, share, *QUESTION_GOALS))
    result.end(options)


def add_first_steps(result: Result, options: argparse.Namespace, num_tokens: int) -> None:
    geometry = Geometry()
    heads = corpus_heads(geometry, num_tokens, options.heads)
    result.add_table(
        "A long prompt begins to generate: the host's part, one layer",
        [computed_by_itself(geometry, heads, chunk) for chunk in (CHUNK_TOKENS, num_tokens)],
    )
    with tempfile.TemporaryDirectory(prefix="relay-bench-") as name:
        engine = Engine(geometry, heads, num_tokens, Path(name), {})
        llm_engine = engine.llm.llm_engine
        rows = [behind_context(llm_engine, engine.tokens.tolist()) for _ in range(2)]
    result.add_table(f"A request behind a stored context begins, {NUM_OTHERS} others decode", rows)
    longest_s = max(row["longest, ms"] for row in rows) / 1e3
    name = f"longest step when a request of {num_tokens} tokens begins, s"
    result.add_goal(Goal(name, longest_s, *LONGEST_STEP_GOALS, lower_is_better=True))


def add_engine_tables(
    result: Result,
    options: argparse.Namespace,
    decode_tokens: int,
    first_tokens: int,
    num_layers: int,
) -> None:
    rows, times_as_fast = [], []
    for setting in SETTINGS:
        row, value = measure_in_a_folder(options, decode_tokens, setting)
        rows.append(row)
        times_as_fast.append(value)
    result.add_table(DECODE_TITLE, rows)
    faster = times_as_fast[0]
    with tempfile.TemporaryDirectory(prefix="relay-bench-") as name:
        row, computed, copied = measure_first_token(
            options, first_tokens, num_layers, Path(name) / "first"
        )
        result.add_table("Time to the first token", [row])
    result.add_goal(Goal(f"decode attention over {decode_tokens} tokens", faster, *DECODE_GOALS))
    result.add_goal(
        Goal(f"first token over {first_tokens}: computing over reusing", computed, *COMPUTE_GOALS)
    )
    result.add_goal(
        Goal(f"first token over {first_tokens}: copying over attention", copied, *COPY_GOALS)
    )


if __name__ == "__main__":
    main()

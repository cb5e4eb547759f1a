# SPDX-License-Identifier: Apache-2.0
"""Two real vLLMs that Ray runs, beside one with all cores and beside what simulation says of them.

Prompts of tokens under a few prefixes in random order, answered by the recall model on this
machine's CPU, each replica with a part of its cores. What a step and a token take is fitted to what
replicas take for two other sets, each for its own prompts, all at the same time: long answers, and
prompts under prefixes of the same length, since tokens that have more before them take longer,
which a simulation does not count. vLLM's own schedulers then say in virtual time what the replicas
take together for these. The first round is left out.
"""

import os
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.support.formatting import Row
from benchmarks.support.options import argument_parser
from benchmarks.support.result import Goal, Result
from vllm_relay.cluster.rules import Buckets
from vllm_relay.cluster.simulate import Outcome, simulated_replicas
from vllm_relay.demo.recall_model import build_recall_model
from vllm_relay.prefix_cache.predict.engine import CacheSize, PredictorSettings
from vllm_relay.prefix_cache.predict.input import PredictedRequest
from vllm_relay.prefix_cache.predict.step_costs import StepCosts, StepSample, fit_costs
from vllm_relay.tables.engines.base import Completion, Engine, Prompt
from vllm_relay.tables.engines.opening import open_engine
from vllm_relay.tables.engines.replicas import ReplicaEngine
from vllm_relay.tables.question import Question

BLOCK_TOKENS = 32
NUM_BLOCKS = 400
MAX_RUNNING = 16
BATCHED_TOKENS = 2048
MAX_MODEL_LEN = 1024
VOCABULARY = range(4, 150)
# prefixes, prompts under each, tokens of a prefix and of what follows, most tokens of answers
FITTED = {
    "under prefixes": (4, 24, 320, 96, 8),
    "answers": (1, 16, 0, 32, 64),
}


def token_prompts(
    prefixes: int, under_each: int, prefix_tokens: int, own_tokens: int, seed: int
) -> list[Prompt]:
    rng = np.random.default_rng(seed)
    begins = rng.choice(VOCABULARY, (prefixes, prefix_tokens)).tolist()
    chosen = rng.permutation(np.arange(prefixes * under_each) % prefixes).tolist()
    ends = rng.choice(VOCABULARY, (len(chosen), own_tokens)).tolist()
    return [
        Prompt(number, "", [*begins[prefix], *end])
        for number, (prefix, end) in enumerate(zip(chosen, ends, strict=True))
    ]


@dataclass(frozen=True)
class Asked:
    """What an engine did with prompts, in rounds after the first."""

    prompts: Sequence[Prompt]
    completions: Sequence[Completion]
    seconds: float

    @property
    def uncached_tokens(self) -> int:
        return sum(each.num_prompt_tokens - each.num_cached_tokens for each in self.completions)


def ask(engine: Engine, prompts: Sequence[Prompt], max_tokens: int) -> Asked:
    began_s = time.perf_counter()
    found = list(engine.generate(iter(prompts), Question("?", ("text",), max_tokens=max_tokens)))
    seconds = time.perf_counter() - began_s
    errors = [each.error for each in found if each.error]
    if errors:
        raise SystemExit(f"an engine failed: {errors[0]}")
    return Asked(prompts, sorted(found, key=lambda each: each.number), seconds)


def measure(
    model: str, options: Namespace
) -> tuple[dict[str, list[Asked]], list[dict[str, Asked]]]:
    """Of each replica alone, by prompts; and round by round, by engine."""
    arguments = {
        "dtype": "float32",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": MAX_RUNNING,
        "max_num_batched_tokens": BATCHED_TOKENS,
        "block_size": BLOCK_TOKENS,
        "num_gpu_blocks_override": NUM_BLOCKS,
        "enforce_eager": True,
    }
    several = open_engine(model, replicas=options.replicas, **arguments)
    one = open_engine(model, **arguments)
    assert isinstance(several, ReplicaEngine)
    numbers = range(options.rounds + 1)
    try:
        alone: dict[str, list[Asked]] = {}
        with ThreadPoolExecutor(options.replicas) as pool:
            for name, (*shape, max_tokens) in FITTED.items():
                for number in numbers:
                    prompts = token_prompts(*shape, seed=number)
                    each = partial(ask, prompts=prompts, max_tokens=max_tokens)
                    found = list(pool.map(each, several.engines))
                    if number:
                        alone.setdefault(name, []).extend(found)
        rounds = []
        for number in numbers:
            prompts = token_prompts(*options.shape, seed=100 + number)
            every = {"one engine": one, "replicas": several}
            rounds.append(
                {name: ask(each, prompts, options.answer_tokens) for name, each in every.items()}
            )
    finally:
        several.close()
        one.close()
    return alone, rounds[1:]


def simulate(model: str, asked: Asked, replicas: int, costs: StepCosts) -> Outcome:
    """With answers as long as they were."""
    settings = PredictorSettings(
        model,
        "queue",
        block_size=BLOCK_TOKENS,
        max_num_seqs=MAX_RUNNING,
        max_num_batched_tokens=BATCHED_TOKENS,
        max_model_len=MAX_MODEL_LEN,
        dtype="float32",
    )
    requests = [
        PredictedRequest(prompt.number, prompt.token_ids, completion.num_output_tokens)
        for prompt, completion in zip(asked.prompts, asked.completions, strict=True)
    ]
    size = CacheSize(blocks=NUM_BLOCKS)
    with simulated_replicas(settings, size, replicas, costs, requests, online=False) as every:
        return every.run(Buckets(every), MAX_RUNNING + MAX_RUNNING // 4)


def uncached(outcome: Outcome) -> int:
    return sum(each.prompt_tokens - each.cached_tokens for each in outcome.replicas)


def fit(model: str, alone: dict[str, list[Asked]]) -> tuple[StepCosts, list[Row]]:
    """What a step and a token take of a replica."""
    rows: list[Row] = []
    samples = []
    for name, every in alone.items():
        steps, tokens = (
            simulate(model, every[0], 1, StepCosts(*each)).makespan_s
            for each in ((1.0, 0.0), (0.0, 1.0))
        )
        seconds = statistics.median(each.seconds for each in every)
        samples.append(StepSample(steps, tokens, seconds))
        rows.append({"prompts": name, "steps": steps, "tokens": tokens, "s": seconds})
    return fit_costs(samples), rows


def main() -> None:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    # one vLLM is in this process, as those of the actors are in theirs
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    parser = argument_parser(__doc__, rounds=3)
    parser.add_argument("--replicas", type=int, default=2, help="(%(default)s)")
    options = parser.parse_args()
    options.shape, options.answer_tokens = (16, 96, 320, 96), 8
    if options.smoke:
        options.shape, options.answer_tokens, options.rounds = (2, 4, 64, 32), 2, 1
    result = Result.begin(__file__, __doc__, options)
    with tempfile.TemporaryDirectory(prefix="relay-bench-") as folder:
        model = str(build_recall_model(folder, dtype="float32"))
        alone, rounds = measure(model, options)
        costs, fitted = fit(model, alone)
        rows: list[Row] = []
        for asked in rounds:
            outcome = simulate(model, asked["replicas"], options.replicas, costs)
            row: Row = {}
            for name, each in asked.items():
                row |= {f"{name} s": each.seconds, f"{name}, uncached": each.uncached_tokens}
            row |= {"simulated s": outcome.makespan_s, "simulated, uncached": uncached(outcome)}
            rows.append(row)
    note = f"A step {1e3 * costs.step_s:.2f} ms, a token {1e6 * costs.token_s:.0f} us."
    result.add_table("Replicas, each with prompts of its own", fitted, note)
    result.add_table("The same prompts", rows)
    off = abs(statistics.median(row["replicas s"] / row["simulated s"] for row in rows) - 1)
    result.add_goal(Goal("makespan off from the simulated one", off, 0.15, None, True, ""))
    more = [row["replicas, uncached"] / row["one engine, uncached"] for row in rows]
    goal = "uncached tokens, replicas' over one engine's"
    result.add_goal(Goal(goal, statistics.median(more), 1.05, 1.0, True))
    result.end(options)


if __name__ == "__main__":
    main()

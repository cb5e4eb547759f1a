# SPDX-License-Identifier: Apache-2.0
"""Requests below the threshold: what relay_sparse costs where it has nothing to do.

The demo's recall model, or another one, answers the same prompts of fewer than `min_context_tokens`
tokens with RELAY and with RELAY_SPARSE, in engines that live at the same time and take turns after
every step. Each is one process, whose front end waits for its core; by default the two work beside
each other. Seconds are those of the median of the rounds, step by step, added up; of "whole
rounds", what does not come back at the same step is in the ratio too. The engines are started
several times, since where a process gets its memory makes a difference; "from" and "to" hold "times
as long" in 19 of 20 cases. "identical" are outputs with the same tokens.
"""

import os
import statistics
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from benchmarks.long_context.alternating_engine import AlternatingEngine, in_turn
from benchmarks.support.formatting import Row
from benchmarks.support.options import argument_parser
from benchmarks.support.result import Goal, Result
from vllm_relay.demo.engine import EngineSettings
from vllm_relay.demo.recall_model import build_recall_model
from vllm_relay.demo.requests import tokenize
from vllm_relay.demo.workload import ledger_workload

DENSE, SPARSE = "RELAY", "RELAY_SPARSE"
MOST_TIMES = 1.01
DRAWS = 1000


def recall_prompts(model: str, num_prompts: int, prompt_tokens: int) -> list[list[int]]:
    """Questions to two ledgers."""
    workload = ledger_workload(
        num_system_prompts=2,
        system_prompt_tokens=prompt_tokens,
        questions_per_prompt=num_prompts // 2,
        output_tokens=8,
    )
    requests = tokenize(AutoTokenizer.from_pretrained(model), workload)
    return [request.prompt_token_ids for request in requests]


def made_up_prompts(num_prompts: int, prompt_tokens: int) -> list[list[int]]:
    """For models that this benchmark knows nothing of: ids that every vocabulary has."""
    return [
        [1] + [3 + (number * 7919 + i * i * 31 + i * 17) % 250 for i in range(prompt_tokens)]
        for number in range(num_prompts)
    ]


@dataclass
class Launch:
    """Two engines that were started together: seconds [rounds, steps] of each backend."""

    seconds: dict[str, np.ndarray]
    num_identical: int

    def whole_s(self, backend: str, rounds: Any = slice(None)) -> float:
        """Of all prompts: what each step takes in the median of the rounds, added up."""
        return float(np.median(self.seconds[backend][rounds], axis=0).sum())

    def round_s(self, backend: str) -> float:
        """Of all prompts: the median of the rounds."""
        return float(np.median(self.seconds[backend].sum(axis=1)))


def measure(
    model: str, prompts: list[list[int]], folder: Path, backends: list[str], options: Namespace
) -> Launch:
    """Starts an engine for each backend, in this order."""
    most_tokens = max(map(len, prompts)) + options.output_tokens
    seconds: dict[str, list[list[float]]] = {backend: [] for backend in backends}
    num_identical = 0
    with ExitStack() as stack:
        engines = {}
        for backend in backends:
            settings = EngineSettings(model, backend, options.dtype, most_tokens, options.prompts)
            log_path = folder / f"{backend}.log"
            engines[backend] = stack.enter_context(AlternatingEngine(backend, settings, log_path))
        for engine in engines.values():
            engine.wait()
        # the first two fill prefix caches, and end up with other steps than those that follow
        for number in range(-2, options.rounds):
            taken, answers = in_turn(engines, prompts, options.output_tokens)
            if number >= 0:
                for backend, each in taken.items():
                    seconds[backend].append(each)
                pairs = zip(answers[DENSE], answers[SPARSE], strict=True)
                num_identical += sum(dense == sparse for dense, sparse in pairs)
    return Launch({name: np.array(each) for name, each in seconds.items()}, num_identical)


def ratio_of(launches: Sequence[Launch]) -> float:
    sparse_s, dense_s = (
        sum(launch.whole_s(backend) for launch in launches) for backend in (SPARSE, DENSE)
    )
    return sparse_s / dense_s


def interval(launches: Sequence[Launch]) -> tuple[float, float]:
    """What `ratio_of` is between in 19 of 20 cases: launches and their rounds are drawn anew."""
    rng = np.random.default_rng(0)
    drawn = []
    for _ in range(DRAWS):
        sparse_s = dense_s = 0.0
        for number in rng.integers(len(launches), size=len(launches)):
            launch = launches[number]
            num_rounds = len(launch.seconds[DENSE])
            rounds = rng.integers(num_rounds, size=num_rounds)
            sparse_s += launch.whole_s(SPARSE, rounds)
            dense_s += launch.whole_s(DENSE, rounds)
        drawn.append(sparse_s / dense_s)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(low), float(high)


def row_of(name: str, launches: Sequence[Launch]) -> Row:
    low, high = interval(launches)
    dense_round_s, sparse_round_s = (
        statistics.mean(launch.round_s(backend) for launch in launches)
        for backend in (DENSE, SPARSE)
    )
    return {
        "launch": name,
        "rounds": sum(len(launch.seconds[DENSE]) for launch in launches),
        "steps": launches[0].seconds[DENSE].shape[1],
        "relay s": statistics.mean(launch.whole_s(DENSE) for launch in launches),
        "relay_sparse s": statistics.mean(launch.whole_s(SPARSE) for launch in launches),
        "times as long": round(ratio_of(launches), 4),
        "from": round(low, 4),
        "to": round(high, 4),
        "whole rounds": round(sparse_round_s / dense_round_s, 4),
        "identical": sum(launch.num_identical for launch in launches),
    }


def main() -> None:
    parser = argument_parser(__doc__, rounds=20)
    parser.add_argument("--launches", type=int, default=4, help="of both engines (%(default)s)")
    parser.add_argument("--model", help="folder of another model; the recall model if not given")
    parser.add_argument("--prompts", type=int, default=48, help="(%(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=1500, help="(%(default)s)")
    parser.add_argument("--output-tokens", type=int, default=48, help="(%(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="(%(default)s)")
    options = parser.parse_args()
    result = Result.begin(__file__, __doc__, options)
    if options.smoke:
        options.prompts, options.prompt_tokens, options.output_tokens = 4, 200, 4
        options.rounds = options.launches = 1
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # vLLM does not set them in this case
    with tempfile.TemporaryDirectory(prefix="relay-bench-") as directory:
        folder = Path(directory)
        model = options.model or str(build_recall_model(folder / "model", dtype=options.dtype))
        if options.model:
            prompts = made_up_prompts(options.prompts, options.prompt_tokens)
        else:
            prompts = recall_prompts(model, options.prompts, options.prompt_tokens)
        launches = [
            measure(model, prompts, folder, [DENSE, SPARSE][:: -1 if number % 2 else 1], options)
            for number in range(options.launches)
        ]
    rows = [row_of(str(number), [launch]) for number, launch in enumerate(launches, 1)]
    total = row_of("all", launches)
    title = f"{len(prompts)} requests of {max(map(len, prompts)):,} tokens, below the threshold"
    result.add_table(title, [*rows, total])
    value, num_outputs = total["times as long"], len(prompts) * total["rounds"]
    result.add_goal(Goal("time over relay's", value, MOST_TIMES, 1.0, lower_is_better=True))
    different = num_outputs - total["identical"]
    result.add_goal(Goal("outputs that differ", different, 0, 0, lower_is_better=True, unit=""))
    result.end(options)


if __name__ == "__main__":
    main()

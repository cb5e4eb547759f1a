# SPDX-License-Identifier: Apache-2.0
"""Traces of servers by their timestamps, in virtual time: hits and waits over stock's.

`--data` is a folder with traces of Mooncake's format (*.jsonl with timestamp, input_length,
output_length and hash_ids); without it conversations are made. All lengths are divided by 32: a
hash id, which stands for 512 tokens, becomes one KV block of 16, and a step stands for 32, so that
hits are those of blocks of 512 tokens and a request takes a tenth of the steps.

Load is in parts of what stock serves with the smallest cache if all requests are there at once: a
step and a token take as much as gives it, in the proportion of `vllm-relay predict`'s defaults.
Caches are in parts of what an unlimited one would hold at the end.
"""

import json
import tempfile
from argparse import Namespace
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from benchmarks.scheduler.bench_scheduler import MODEL
from benchmarks.support.formatting import Row
from benchmarks.support.options import argument_parser
from benchmarks.support.result import Goal, Result
from vllm_relay.prefix_cache.predict.engine import CacheSize, PredictorSettings
from vllm_relay.prefix_cache.predict.input import TRACE_BLOCK_TOKENS, PredictedRequest
from vllm_relay.prefix_cache.predict.load import Load
from vllm_relay.prefix_cache.predict.predictor import Prediction, Predictor
from vllm_relay.prefix_cache.predict.step_costs import DEFAULT_COSTS, StepCosts

SCALE = 32
BLOCK_TOKENS = TRACE_BLOCK_TOKENS // SCALE
BATCHED_TOKENS = 8192 // SCALE
CACHE_PARTS = (0.005, 0.02, 0.1)
LOADS = (0.8, 1.1)


@dataclass(frozen=True)
class Trace:
    requests: list[PredictedRequest]
    """Scaled."""
    arrivals_s: list[float]

    @property
    def longest_tokens(self) -> int:
        return max(len(each.prompt_token_ids) + each.output_tokens for each in self.requests)

    @property
    def distinct_blocks(self) -> int:
        return len({token for each in self.requests for token in each.prompt_token_ids})


def to_trace(rows: list[dict]) -> Trace:
    requests = []
    for line, row in enumerate(rows, start=1):
        tokens = np.repeat(row["hash_ids"], BLOCK_TOKENS)[: -(-row["input_length"] // SCALE)]
        outputs = -(-row["output_length"] // SCALE)
        requests.append(PredictedRequest(line, tokens.tolist(), max(1, outputs)))
    return Trace(requests, [row["timestamp"] / 1e3 for row in rows])


def made_conversations(requests: int, seed: int = 0) -> list[dict]:
    """Conversations under one system prompt, each turn with all before it."""
    rng = np.random.default_rng(seed)
    rows, next_id = [], 1
    while len(rows) < requests:
        hash_ids, timestamp = [0], float(rng.uniform(0, requests / 3))
        for _ in range(rng.geometric(0.3)):
            new = int(rng.geometric(0.1))
            hash_ids = [*hash_ids, *range(next_id, next_id + new)]
            next_id += new
            rows.append(
                {
                    "timestamp": 1e3 * timestamp,
                    "input_length": TRACE_BLOCK_TOKENS * len(hash_ids) - 100,
                    "output_length": int(rng.integers(10, 600)),
                    "hash_ids": hash_ids,
                }
            )
            timestamp += float(rng.exponential(60))
    return sorted(rows, key=lambda row: row["timestamp"])[:requests]


def read_traces(options: Namespace) -> dict[str, Trace]:
    if options.data is None:
        requests = 60 if options.smoke else options.requests
        return {"made conversations": to_trace(made_conversations(requests))}
    traces = {}
    for path in sorted(options.data.glob("*.jsonl")):
        with path.open() as lines:
            rows = [json.loads(line) for line in islice(lines, options.requests)]
        if rows:
            traces[path.stem.removesuffix("_trace")] = to_trace(rows)
    if not traces:
        raise SystemExit(f"no *.jsonl in the folder of --data, {options.data}: put traces there")
    return traces


def describe(prediction: Prediction) -> Row:
    waits = prediction.waits
    assert waits is not None
    return {
        "hit rate": prediction.hit_rate,
        "best eviction": (prediction.belady_tokens or 0) / prediction.prompt_tokens,
        "ceiling": prediction.ceiling_tokens / prediction.prompt_tokens,
        "p50 first token s": waits.first_token_percentile_s(50),
        "p99 first token s": waits.first_token_percentile_s(99),
        "longest wait s": waits.longest_s,
        "preempted": prediction.preemptions,
    }


def measure(model: str, trace: Trace, loads: list[float], parts: list[float]) -> list[Row]:
    settings = PredictorSettings(
        model,
        block_size=BLOCK_TOKENS,
        max_num_batched_tokens=BATCHED_TOKENS,
        max_model_len=trace.longest_tokens + 1,
        eviction="queue",
    )
    predictors = {
        name: Predictor(settings.of_scheduler(name), trace.requests) for name in ("stock", "relay")
    }
    longest = -(-trace.longest_tokens // BLOCK_TOKENS)
    sizes = {
        part: CacheSize(blocks=max(longest + 2, round(part * trace.distinct_blocks)))
        for part in sorted(parts)
    }
    at_once = predictors["stock"].predict(sizes[min(parts)], load=Load(DEFAULT_COSTS)).waits
    assert at_once is not None
    spread = (trace.arrivals_s[-1] - trace.arrivals_s[0]) / at_once.duration_s
    rows: list[Row] = []
    for part, size in sizes.items():
        for load in loads:
            costs = StepCosts(
                DEFAULT_COSTS.step_s * load * spread, DEFAULT_COSTS.token_s * load * spread
            )
            of_load: dict[str, Row] = {}
            for name, predictor in predictors.items():
                found = predictor.predict(size, load=Load(costs, trace.arrivals_s))
                of_load[name] = describe(found)
                hits = of_load[name]["hit rate"] / of_load["stock"]["hit rate"]
                rows.append(
                    {"cache": part, "blocks": size.blocks, "load": load, "scheduler": name,
                     **of_load[name], "hits over stock's": hits}
                )  # fmt: skip
    return rows


def main() -> None:
    parser = argument_parser(__doc__, rounds=1)
    parser.add_argument("--data", type=Path, help="folder with traces of Mooncake's format")
    parser.add_argument(
        "--requests", type=int, default=4000, help="the first of each trace (%(default)s)"
    )
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS, help="%(default)s")
    parser.add_argument("--caches", type=float, nargs="+", default=CACHE_PARTS, help="%(default)s")
    options = parser.parse_args()
    result = Result.begin(__file__, __doc__, options)
    with tempfile.TemporaryDirectory(prefix="relay-bench-") as folder:
        model = MODEL.save(Path(folder))
        for name, trace in read_traces(options).items():
            rows = measure(model, trace, options.loads, options.caches)
            result.add_table(f"{name}: {len(trace.requests):,} requests", rows)
            over = [row["hits over stock's"] for row in rows if row["scheduler"] == "relay"]
            small = [
                row["hits over stock's"]
                for row in rows
                if row["scheduler"] == "relay" and row["cache"] == min(options.caches)
            ]
            what = f"{name}, hits over stock's"
            result.add_goal(Goal(f"{what}, the least", min(over), 1.0))
            result.add_goal(Goal(f"{what}, the least with the smallest cache", min(small), 1.1))
    result.end(options)


if __name__ == "__main__":
    main()

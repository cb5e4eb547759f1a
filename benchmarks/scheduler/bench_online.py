# SPDX-License-Identifier: Apache-2.0
"""A server in virtual time: RelayScheduler against vLLM's while requests arrive one by one.

Close to its capacity a server's longest waits grow many times faster than the time of a step, so
that on a shared machine they tell more of the neighbours than of the scheduler. Here vLLM's engine
core runs with a stub for the model, and a clock that every step moves by what it would take: a
constant, and a time per token, both measured on the model of bench_scheduler. The workload and the
engine's settings are those of bench_scheduler; load is in parts of what stock serves offline.

The second table is for requests that are kept back and given to the engine together, every so many
seconds: what hits cost where there are too few requests to reorder.
"""

import math
import statistics
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.scheduler.bench_scheduler import (
    BLOCK_SIZE_TOKENS,
    CACHED_REQUESTS,
    MODEL,
    OUTPUT_TOKENS,
    OWN_TOKENS,
    PATIENT,
    PREFIX_TOKENS,
    PREFIXES,
    RELAY,
    REQUESTS,
    make_prompts,
)
from benchmarks.support.formatting import Row
from benchmarks.support.options import argument_parser
from benchmarks.support.result import Goal, Result
from vllm_relay.prefix_cache.predict.engine import CacheSize, PredictorSettings
from vllm_relay.prefix_cache.predict.input import PredictedRequest
from vllm_relay.prefix_cache.predict.load import Load, poisson_s
from vllm_relay.prefix_cache.predict.predictor import Predictor, Waits
from vllm_relay.prefix_cache.predict.step_costs import StepCosts

COSTS = StepCosts(4.2e-3, 34e-6)
BARS = {0.8: 1.3, 0.95: 2.5, 1.1: 4.0}
"""By load: how much sooner than stock's the first tokens of the slowest hundredth come."""
LOADS = (0.5, *BARS)
COLLECTED_S = (0.5, 2.0, 5.0, 10.0, 20.0)
SCHEDULERS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "relay": RELAY,
    "relay, max_hold_s 20": PATIENT,
}


def serve(
    model: str,
    relay: dict[str, Any] | None,
    prompts: list[list[int]],
    arrivals_s: list[float],
) -> tuple[float, Waits]:
    """Returns the hit rate, too."""
    settings = PredictorSettings(
        model,
        eviction=None if relay is None else "queue",
        block_size=BLOCK_SIZE_TOKENS,
        max_num_seqs=32,
        max_num_batched_tokens=2048,
        max_model_len=PREFIX_TOKENS + OWN_TOKENS + OUTPUT_TOKENS,
        dtype="bfloat16",
        relay=relay or {},
    )
    requests = [PredictedRequest(i, prompt, OUTPUT_TOKENS) for i, prompt in enumerate(prompts)]
    blocks = CACHED_REQUESTS * ((PREFIX_TOKENS + OWN_TOKENS) // BLOCK_SIZE_TOKENS) + 1
    prediction = Predictor(settings, requests).predict(
        CacheSize(blocks=blocks), load=Load(COSTS, arrivals_s)
    )
    assert prediction.waits is not None
    return prediction.hit_rate, prediction.waits


def measure(
    model: str,
    relay: dict[str, Any] | None,
    prefixes: int,
    requests: int,
    per_s: float,
    seeds: Iterable[int],
    collected_s: float = 0.0,
) -> Row:
    hit_rates, per_s_served, first_token_s = [], [], []
    for seed in seeds:
        arrivals_s = poisson_s(per_s, requests, seed)
        given_s = [
            math.ceil(s / collected_s) * collected_s if collected_s else s for s in arrivals_s
        ]
        hit_rate, waits = serve(model, relay, make_prompts(prefixes, requests, seed), given_s)
        hit_rates.append(hit_rate)
        per_s_served.append(waits.requests_per_s)
        kept_s = [given - arrived for given, arrived in zip(given_s, arrivals_s, strict=True)]
        first_token_s += [a + b for a, b in zip(waits.first_token_s, kept_s, strict=True)]
    percentiles_s = statistics.quantiles(first_token_s, n=100, method="inclusive")
    return {
        "hit rate": statistics.mean(hit_rates),
        "requests per s": statistics.mean(per_s_served),
        "first token p50 ms": 1e3 * percentiles_s[49],
        "first token p99 ms": 1e3 * percentiles_s[98],
        "first token longest ms": 1e3 * max(first_token_s),
    }


def main() -> None:
    options = argument_parser(__doc__, rounds=5).parse_args()
    result = Result.begin(__file__, __doc__, options)
    prefixes, requests, seeds = PREFIXES, REQUESTS, range(options.rounds)
    if options.smoke:
        prefixes, requests, seeds = 4, 24, range(1)
    with tempfile.TemporaryDirectory(prefix="relay-bench-") as folder:
        model = MODEL.save(Path(folder))
        prompts = make_prompts(prefixes, requests, seed=0)
        _, at_once = serve(model, None, prompts, [0.0] * requests)
        capacity_per_s = at_once.requests_per_s
        rows: list[Row] = [
            {
                "load": load,
                "scheduler": name,
                **measure(model, relay, prefixes, requests, load * capacity_per_s, seeds),
            }
            for load in LOADS
            for name, relay in SCHEDULERS.items()
        ]
        collected: list[Row] = [
            {
                "collected s": collected_s,
                **measure(
                    model, PATIENT, prefixes, requests, 0.8 * capacity_per_s, seeds, collected_s
                ),
            }
            for collected_s in COLLECTED_S
        ]
    ceiling = (requests - prefixes) * PREFIX_TOKENS / sum(map(len, prompts))
    result.add_table(
        f"{requests} requests under {prefixes} prefixes, {len(seeds)} random arrivals, ceiling "
        f"{ceiling:.1%}; stock serves {capacity_per_s:.1f} requests per s offline",
        rows,
    )
    result.add_table("Load 0.8, requests given to relay together", collected)
    for load, bar in BARS.items():
        stock, relay, _ = (row for row in rows if row["load"] == load)
        gain = stock["first token p99 ms"] / relay["first token p99 ms"]
        what = f"virtual time, load {load:g}, p99 time to first token, stock's over relay's"
        result.add_goal(Goal(what, gain, bar))
    result.end(options)


if __name__ == "__main__":
    main()

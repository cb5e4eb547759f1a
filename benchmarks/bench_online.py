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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

from benchmarks.bench_scheduler import (
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
    poisson_arrivals_s,
)
from benchmarks.common import Goal, Result, Row, argument_parser
from vllm_relay.prefix_cache.predict.executor import StubExecutor

STEP_S, TOKEN_S = 4.2e-3, 34e-6
LOADS = (0.5, 0.8, 0.95, 1.1)
COLLECTED_S = (0.5, 2.0, 5.0, 10.0, 20.0)
SCHEDULERS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "relay": RELAY,
    "relay, max_hold_s 20": PATIENT,
}


@dataclass
class Served:
    hit_rate: float
    requests_per_s: float
    first_token_s: list[float]


def make_core(model: str, relay: dict[str, Any] | None) -> EngineCore:
    args = EngineArgs(
        model,
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        enforce_eager=True,
        disable_log_stats=True,
        async_scheduling=False,
        block_size=BLOCK_SIZE_TOKENS,
        num_gpu_blocks_override=CACHED_REQUESTS
        * ((PREFIX_TOKENS + OWN_TOKENS) // BLOCK_SIZE_TOKENS)
        + 1,
        max_num_seqs=32,
        max_num_batched_tokens=2048,
        max_model_len=PREFIX_TOKENS + OWN_TOKENS + OUTPUT_TOKENS,
        enable_prefix_caching=True,
        additional_config={} if relay is None else {"relay": relay},
    )
    config = args.create_engine_config(UsageContext.ENGINE_CONTEXT)
    return EngineCore(config, partial(StubExecutor, available_bytes=1 << 28), False)


def serve(
    model: str,
    relay: dict[str, Any] | None,
    prompts: list[list[int]],
    arrivals_s: list[float],
    collected_s: float = 0.0,
) -> Served:
    core = make_core(model, relay)
    scheduler: Any = core.scheduler
    now_s, cached_tokens, scheduled_tokens = 0.0, 0, 0
    first_token_s: dict[str, float] = {}
    sampling = SamplingParams(
        temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False
    )
    core.model_executor.sampler = lambda request_id: (
        [] if scheduler.requests[request_id].is_prefill_chunk else [3]
    )
    if relay is not None:
        scheduler.waiting._clock = lambda: now_s
    given_s = [math.ceil(s / collected_s) * collected_s if collected_s else s for s in arrivals_s]
    schedule = scheduler.schedule

    def schedule_and_count(*args: Any, **kwargs: Any) -> Any:
        nonlocal scheduled_tokens
        output = schedule(*args, **kwargs)
        scheduled_tokens = output.total_num_scheduled_tokens
        return output

    scheduler.schedule = schedule_and_count
    added = 0
    try:
        while added < len(prompts) or scheduler.has_requests():
            if not scheduler.has_requests():
                now_s = max(now_s, given_s[added])
            while added < len(prompts) and given_s[added] <= now_s:
                hasher = core.request_block_hasher
                core.add_request(
                    Request(str(added), prompts[added], sampling, None, block_hasher=hasher)
                )
                added += 1
            outputs, _ = core.step()
            now_s += STEP_S + TOKEN_S * scheduled_tokens
            for output in outputs[0].outputs if outputs else ():
                if output.prefill_stats is not None:
                    cached_tokens += output.prefill_stats.num_cached_tokens
                if output.new_token_ids:
                    waited_s = now_s - arrivals_s[int(output.request_id)]
                    first_token_s.setdefault(output.request_id, waited_s)
    finally:
        core.shutdown()
    hit_rate = cached_tokens / sum(map(len, prompts))
    return Served(hit_rate, len(prompts) / now_s, list(first_token_s.values()))


def measure(
    model: str,
    relay: dict[str, Any] | None,
    prefixes: int,
    requests: int,
    per_s: float,
    seeds: Iterable[int],
    collected_s: float = 0.0,
) -> Row:
    runs = [
        serve(
            model,
            relay,
            make_prompts(prefixes, requests, seed),
            poisson_arrivals_s(requests, per_s, seed),
            collected_s,
        )
        for seed in seeds
    ]
    waits_s = [wait_s for each in runs for wait_s in each.first_token_s]
    percentiles_s = statistics.quantiles(waits_s, n=100, method="inclusive")
    return {
        "hit rate": statistics.mean(each.hit_rate for each in runs),
        "requests per s": statistics.mean(each.requests_per_s for each in runs),
        "first token p50 ms": 1e3 * percentiles_s[49],
        "first token p99 ms": 1e3 * percentiles_s[98],
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
        capacity_per_s = serve(model, None, prompts, [0.0] * requests).requests_per_s
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
    stock, relay_row, _ = (row for row in rows if row["load"] == 0.8)
    gain = stock["first token p99 ms"] / relay_row["first token p99 ms"]
    what = "virtual time, load 0.8, p99 time to first token, stock's over relay's"
    result.add_goal(Goal(what, gain, 1.0, 2.0))
    result.end(options)


if __name__ == "__main__":
    main()

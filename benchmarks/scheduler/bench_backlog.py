# SPDX-License-Identifier: Apache-2.0
"""What a long queue costs: hits and waits of a server that is always behind, in virtual time.

64 prefixes, a KV cache for 4 of them and the requests that run; 20 requests arrive in a second, and
the server begins 20 in a second whatever it finds in its cache, so that the backlog with which it
starts stays. A request hits if it finds its whole prefix. In the tree all prefixes begin with one
common block, which counts for nothing.

Hits are those of the requests that begin after twice the backlog. The longest wait is that of all
requests, those that still wait at the end included; over FCFS's is it that of vLLM's scheduler in
the same virtual time. FCFS with relay's eviction is `max_hold_s` 0.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.v1.request import Request

from benchmarks.scheduler.bench_scheduler import MODEL
from benchmarks.support.formatting import Row
from benchmarks.support.options import argument_parser
from benchmarks.support.result import Goal, Result
from vllm_relay.prefix_cache.predict.engine import (
    CacheSize,
    PredictorSettings,
    create_config,
    create_core,
)
from vllm_relay.prefix_cache.predict.step_costs import StepCosts
from vllm_relay.prefix_cache.predict.virtual_time import Course, VirtualServer

PREFIXES, CACHED_PREFIXES = 64, 4
BLOCK_SIZE_TOKENS = 16
PREFIX_BLOCKS, COMMON_BLOCKS = 8, 1
OWN_TOKENS, OUTPUT_TOKENS = 12, 4
"""Together one block of every request."""
REQUESTS_PER_S = 20
BACKLOGS = (400, 4000)
WORKLOADS = ("uniform", "Zipf", "tree")
RUNNING = 4
"""As many as a request takes steps, so that one begins in every step."""
NO_LIMIT = {"max_hold_s": 1e9, "max_overtakes": 10**9}
SCHEDULERS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "relay, max_hold_s 0": {"max_hold_s": 0.0},
    "relay": {},
    "relay without limits": NO_LIMIT,
}


@dataclass(frozen=True)
class Workload:
    prompts: list[list[int]]
    arrivals_s: list[float]
    prefix_tokens: int


def make_workload(kind: str, prefixes: int, backlog: int, requests: int) -> Workload:
    """A backlog at time 0, then one request after the other."""
    rng = np.random.default_rng(0)
    tokens = PREFIX_BLOCKS * BLOCK_SIZE_TOKENS
    shared = rng.integers(3, MODEL.vocab_size, (prefixes, tokens))
    if kind == "tree":
        shared[:, : COMMON_BLOCKS * BLOCK_SIZE_TOKENS] = shared[0, 0]
    popularity = 1 / np.arange(1, prefixes + 1) if kind == "Zipf" else np.ones(prefixes)
    chosen = rng.choice(prefixes, requests, p=popularity / popularity.sum())
    own = rng.integers(3, MODEL.vocab_size, (requests, OWN_TOKENS))
    prompts = np.concatenate([shared[chosen], own], axis=1).tolist()
    later_s = np.arange(1, requests - backlog + 1) / REQUESTS_PER_S
    return Workload(prompts, [0.0] * backlog + later_s.tolist(), tokens)


def serve(
    model: str, relay: dict[str, Any] | None, workload: Workload, until_s: float
) -> list[Course]:
    """The courses of the requests that arrived, in the order of their arrival."""
    settings = PredictorSettings(
        model,
        eviction=None if relay is None else "queue",
        block_size=BLOCK_SIZE_TOKENS,
        max_num_seqs=RUNNING,
        max_num_batched_tokens=2048,
        max_model_len=workload.prefix_tokens + OWN_TOKENS + OUTPUT_TOKENS,
        relay=relay or {},
    )
    blocks = CACHED_PREFIXES * PREFIX_BLOCKS + RUNNING + 1
    core = create_core(create_config(settings, online=True), CacheSize(blocks=blocks))
    try:
        scheduler, executor = core.scheduler, core.model_executor
        executor.sampler = lambda request_id: (
            [] if scheduler.requests[request_id].is_prefill_chunk else [3]
        )
        sampling = SamplingParams(
            temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False
        )
        requests = [
            Request(str(index), prompt, sampling, None, block_hasher=core.request_block_hasher)
            for index, prompt in enumerate(workload.prompts)
        ]
        server = VirtualServer(core, StepCosts(1 / REQUESTS_PER_S, 0.0))
        server.serve(requests, workload.arrivals_s, until_s=until_s)
        return list(server.courses.values())
    finally:
        core.shutdown()


def describe(courses: Sequence[Course], workload: Workload, backlog: int, until_s: float) -> Row:
    begun = sorted((c for c in courses if c.admitted_s is not None), key=lambda c: c.admitted_s)
    counted = begun[2 * backlog :]
    return {
        "hit rate": sum(c.cached_tokens >= workload.prefix_tokens for c in counted) / len(counted),
        "begun": len(begun),
        "begun per s": len(begun) / until_s,
        "p50 wait s": float(np.median([course.waited_s(until_s) for course in begun])),
        "longest wait s": max(course.waited_s(until_s) for course in courses),
    }


def main() -> None:
    parser = argument_parser(__doc__, rounds=1)
    parser.add_argument("--backlogs", type=int, nargs="+", default=BACKLOGS, help="%(default)s")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--schedulers", nargs="+", choices=SCHEDULERS, default=list(SCHEDULERS))
    options = parser.parse_args()
    result = Result.begin(__file__, __doc__, options)
    prefixes, backlogs = (8, [16]) if options.smoke else (PREFIXES, options.backlogs)
    with tempfile.TemporaryDirectory(prefix="relay-bench-") as folder:
        model = MODEL.save(Path(folder))
        for kind in options.workloads:
            rows: list[Row] = []
            for backlog in backlogs:
                # twice the backlog passes uncounted, and as much and a cycle of all prefixes after
                until_s = (4 * backlog + 20 * prefixes) / REQUESTS_PER_S
                requests = backlog + int(until_s * REQUESTS_PER_S)
                workload = make_workload(kind, prefixes, backlog, requests)
                fcfs_s = None
                for name in options.schedulers:
                    courses = serve(model, SCHEDULERS[name], workload, until_s)
                    row = describe(courses, workload, backlog, until_s)
                    fcfs_s = row["longest wait s"] if name == "stock" else fcfs_s
                    over = None if fcfs_s is None else row["longest wait s"] / fcfs_s
                    rows.append({"backlog": backlog, "scheduler": name, **row, "over FCFS's": over})
            result.add_table(f"{kind}, {prefixes} prefixes, cache for {CACHED_PREFIXES}", rows)
            for row in rows:
                if row["scheduler"] == "relay":
                    what = f"{kind}, {row['backlog']} waiting"
                    few = row["backlog"] < 1000
                    bar, aim = (0.8, 0.9) if few else (0.9, 0.97)
                    result.add_goal(Goal(f"{what}, hit rate", row["hit rate"], bar, aim, unit=""))
                    over = row["over FCFS's"]
                    goal = Goal(
                        f"{what}, longest wait over FCFS's", over, 2.0, lower_is_better=True
                    )
                    result.add_goal(goal)
    result.end(options)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Many replicas in virtual time: which requests go where, by relay's rules and by others'.

Each replica is vLLM's own engine core with the relay scheduler and a stub for the model; a clock
moves by what a step would take of an 8B model on an L4 (streams) or an H100 (arrivals). All routers
get the same requests at the same times. Streams are read as far as a buffer of 5,000 reaches; a
replica takes requests while fewer than 80 of its own wait or run, 64 of them at once. "bursts" are
32 requests at a time. Of traces (`--data`, see `bench_traces`) a token and a step stand for 32.
Figures are simulated.
"""

import statistics
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cluster.rivals import ONLINE, STREAMED
from benchmarks.cluster.workloads import Workload, workloads
from benchmarks.scheduler.bench_scheduler import MODEL
from benchmarks.support.formatting import Row
from benchmarks.support.options import argument_parser
from benchmarks.support.result import Goal, Result
from vllm_relay.cluster.simulate import Outcome, SimulatedReplicas, simulated_replicas
from vllm_relay.prefix_cache.predict.engine import CacheSize, PredictorSettings
from vllm_relay.prefix_cache.predict.load import poisson_s
from vllm_relay.prefix_cache.predict.step_costs import StepCosts

L4 = StepCosts(55e-3, 270e-6)
H100 = StepCosts(8e-3, 35e-6)
BLOCK_TOKENS = 16
MAX_WAITING, MAX_RUNNING = 80, 64
LOADS = (("poisson", 0.8), ("poisson", 0.95), ("bursts", 0.8))
BURST = 32


def scaled(costs: StepCosts, workload: Workload) -> StepCosts:
    return StepCosts(costs.step_s * workload.scale, costs.token_s * workload.scale)


def replicas_of(model: str, workload: Workload, count: int, costs: StepCosts, online: bool) -> Any:
    settings = PredictorSettings(
        model,
        "queue",
        block_size=BLOCK_TOKENS,
        max_num_seqs=MAX_RUNNING,
        max_num_batched_tokens=2048,
        max_model_len=max(1024, workload.longest_tokens),
        dtype="bfloat16",
    )
    size = CacheSize(blocks=workload.cache_blocks)
    return simulated_replicas(settings, size, count, costs, workload.requests, online=online)


def lower_bound_s(replicas: SimulatedReplicas, outcome: Outcome, costs: StepCosts) -> float:
    """Nobody can be sooner: every different block computed once, all replicas always full."""
    seen: set[int] = set()
    tokens = 0
    for request in replicas.requests:
        new = [block for block in request.chain if block not in seen]
        seen.update(new)
        tokens += len(new) * BLOCK_TOKENS + request.prompt_tokens % BLOCK_TOKENS
        tokens += request.output_tokens
    steps = sum(each.output_tokens for each in replicas.requests) / MAX_RUNNING
    return (steps * costs.step_s + tokens * costs.token_s) / len(replicas)


def measure_streams(model: str, options: Namespace) -> list[Row]:
    rows: list[Row] = []
    for name in options.workloads:
        make = workloads(options)[name]
        for rule, source in STREAMED.items():
            found: list[tuple[float, float, float, float]] = []
            for seed in range(options.rounds):
                workload = make(options.replicas, options.stream_requests, seed, 32)
                costs = scaled(L4, workload)
                with replicas_of(model, workload, options.replicas, costs, False) as replicas:
                    outcome = replicas.run(source(replicas), MAX_WAITING)
                    bound_s = lower_bound_s(replicas, outcome, costs)
                found.append(
                    (
                        outcome.hit_rate,
                        outcome.makespan_s,
                        outcome.makespan_s / bound_s,
                        outcome.imbalance,
                    )
                )
            hit_rate, makespan_s, over_bound, imbalance = map(
                statistics.mean, zip(*found, strict=True)
            )
            rows.append(
                {
                    "requests": name,
                    "replicas": options.replicas,
                    "rule": rule,
                    "hit rate": hit_rate,
                    "makespan s": makespan_s,
                    "over lower bound": over_bound,
                    "max over mean load": imbalance,
                }
            )
            print(rows[-1], flush=True)
    return rows


def measure_arrivals(model: str, options: Namespace) -> list[Row]:
    rows: list[Row] = []
    for name in options.workloads:
        make = workloads(options)[name]
        capacity_per_s = 0.0
        for kind, load in LOADS:
            for rule, router in ONLINE.items():
                hit_rates, imbalances, first_token_s, decided_s = [], [], [], []
                for seed in range(options.rounds):
                    workload = make(options.replicas, options.arrivals, seed, 32)
                    costs = scaled(H100, workload)
                    count = len(workload.requests)
                    if not capacity_per_s:
                        with replicas_of(
                            model, workload, options.replicas, costs, True
                        ) as replicas:
                            at_once = replicas.serve(
                                ONLINE["relay"](replicas, costs), [0.0] * count
                            )
                        capacity_per_s = count / at_once.makespan_s
                    arrivals_s = ARRIVALS[kind](load * capacity_per_s, count, seed)
                    with replicas_of(model, workload, options.replicas, costs, True) as replicas:
                        chosen = Timed(router(replicas, costs))
                        outcome = replicas.serve(chosen, arrivals_s)
                    hit_rates.append(outcome.hit_rate)
                    imbalances.append(outcome.imbalance)
                    first_token_s += [each.first_token_after_s(0.0) for each in outcome.courses]
                    decided_s.append(chosen.taken_s / count)
                p50, p99 = np.percentile(first_token_s, (50, 99)).tolist()
                rows.append(
                    {
                        "requests": name,
                        "replicas": options.replicas,
                        "arrivals": kind,
                        "load": load,
                        "rule": rule,
                        "hit rate": statistics.mean(hit_rates),
                        "first token p50 ms": 1e3 * p50,
                        "first token p99 ms": 1e3 * p99,
                        "max over mean load": statistics.mean(imbalances),
                        "decision us": 1e6 * statistics.mean(decided_s),
                    }
                )
                print(rows[-1], flush=True)
    return rows


def bursts_s(per_s: float, count: int, seed: int) -> list[float]:
    """`BURST` requests at a time, these at random."""
    begins_s = poisson_s(per_s / BURST, -(-count // BURST), seed)
    return [begins_s[number // BURST] for number in range(count)]


ARRIVALS = {"poisson": poisson_s, "bursts": bursts_s}


class Timed:
    """How long a router takes to choose."""

    def __init__(self, router: Any) -> None:
        self._router = router
        self.taken_s = 0.0
        self.answered, self.ended = router.answered, router.ended

    def choose(self, *args: Any) -> int:
        began_s = time.perf_counter()
        replica = self._router.choose(*args)
        self.taken_s += time.perf_counter() - began_s
        return replica


def main() -> None:
    parser = argument_parser(__doc__, rounds=3)
    parser.add_argument("--replicas", type=int, default=8, help="(%(default)s)")
    parser.add_argument(
        "--stream-requests", type=int, default=800, help="for each replica (%(default)s)"
    )
    parser.add_argument("--arrivals", type=int, default=250, help="for each replica (%(default)s)")
    parser.add_argument("--workloads", nargs="+", help="(all)")
    parser.add_argument(
        "--data", type=Path, metavar="FOLDER", help="with *.jsonl of a trace (made conversations)"
    )
    options = parser.parse_args()
    options.requests = options.replicas * max(options.stream_requests, options.arrivals)
    options.workloads = options.workloads or list(workloads(options))
    if options.smoke:
        options.workloads = ["skewed"]
        options.replicas, options.stream_requests, options.arrivals, options.rounds = 2, 24, 16, 1
    result = Result.begin(__file__, __doc__, options)
    with tempfile.TemporaryDirectory(prefix="relay-bench-") as folder:
        model = MODEL.save(Path(folder))
        streams = measure_streams(model, options)
        arrivals = measure_arrivals(model, options)
    result.add_table("Prompts that stream in (simulated)", streams)
    result.add_table("Requests that arrive one by one (simulated)", arrivals)
    for name in options.workloads:
        by_rule = {row["rule"]: row for row in streams if row["requests"] == name}
        relay = by_rule.pop("relay")
        gap = 100 * (by_rule["sorted first"]["hit rate"] - relay["hit rate"])
        result.add_goal(
            Goal(f"{name}, streamed: hit rate below the sorted one's", gap, 3, 1, True, "points")
        )
        daft = by_rule["Daft"]["makespan s"] / relay["makespan s"]
        result.add_goal(Goal(f"{name}, streamed: makespan, Daft's over relay's", daft, 1.3, 1.8))
        best = min(row["makespan s"] for row in by_rule.values()) / relay["makespan s"]
        result.add_goal(
            Goal(f"{name}, streamed: makespan, best rival's over relay's", best, 1.1, 1.25)
        )
        for kind, load in LOADS:
            by_rule = {
                row["rule"]: row
                for row in arrivals
                if (row["requests"], row["arrivals"], row["load"]) == (name, kind, load)
            }
            relay = by_rule.pop("relay")
            p99 = relay["first token p99 ms"]
            ray = by_rule["prefix affinity"]["first token p99 ms"] / p99
            what = f"{name}, {kind}, load {load:g}: p99 to first token"
            result.add_goal(Goal(f"{what}, prefix affinity's over relay's", ray, 1.3, 2))
            best = min(row["first token p99 ms"] for row in by_rule.values()) / p99
            result.add_goal(Goal(f"{what}, best rival's over relay's", best, 1.0, 1.3))
    worst = max(
        row["max over mean load"] for row in [*streams, *arrivals] if row["rule"] == "relay"
    )
    result.add_goal(Goal("relay: max over mean load", worst, 1.10, 1.05, True))
    slowest = max(row["decision us"] for row in arrivals if row["rule"] == "relay")
    result.add_goal(Goal("relay: a decision", slowest, 100, 25, True, "us"))
    result.end(options)


if __name__ == "__main__":
    main()

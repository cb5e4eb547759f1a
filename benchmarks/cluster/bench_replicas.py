# SPDX-License-Identifier: Apache-2.0
"""Many replicas in virtual time: which requests go where, by relay's rules and by others'.

Each replica is vLLM's own engine core with the relay scheduler and a stub for the model; a clock
moves by what a step would take of an 8B model on an L4 (streams) or an H100 (arrivals). All routers
get the same requests at the same times. Streams are read as far as a buffer of 5,000 reaches; a
replica takes requests while fewer than 80 of its own wait or run, 64 of them at once. "bursts" are
32 requests at a time; beside them is an oracle that no router can be: it knows the engines as they
are, the lengths of answers and a whole burst (the better of two). Load "while they arrive" leaves
out the end, when some replica still has a long answer and others have nothing to do. Of traces
(`--data`, see `bench_traces`) a token and a step stand for 32. Figures are simulated.
"""

import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cluster.oracle import Oracle
from benchmarks.cluster.rivals import KNOWN_LENGTHS, ONLINE, STREAMED, WEIGHED
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


def lower_bound_s(replicas: SimulatedReplicas, costs: StepCosts) -> float:
    """Nobody can be sooner: every different block computed once, all replicas always full; nor
    than the longest answer alone."""
    seen: set[int] = set()
    tokens = 0
    for request in replicas.requests:
        new = [block for block in request.chain if block not in seen]
        seen.update(new)
        tokens += len(new) * BLOCK_TOKENS + request.prompt_tokens % BLOCK_TOKENS
        tokens += request.output_tokens
    steps = sum(each.output_tokens for each in replicas.requests) / MAX_RUNNING
    longest = max(each.output_tokens for each in replicas.requests)
    together_s = (steps * costs.step_s + tokens * costs.token_s) / len(replicas)
    return max(together_s, longest * costs.seconds(1))


def measure_streams(model: str, options: Namespace) -> list[Row]:
    rows: list[Row] = []
    for name in options.workloads:
        make = workloads(options)[name]
        for rule, source in {**STREAMED, **KNOWN_LENGTHS}.items():
            found: list[tuple[float, float, float, float]] = []
            for seed in range(options.rounds):
                workload = make(options.replicas, options.stream_requests, seed, 32)
                lengths = {each.output_tokens for each in workload.requests}
                if rule in KNOWN_LENGTHS and len(lengths) == 1:
                    break
                costs = scaled(L4, workload)
                with replicas_of(model, workload, options.replicas, costs, False) as replicas:
                    outcome = replicas.run(source(replicas), MAX_WAITING)
                    bound_s = lower_bound_s(replicas, costs)
                found.append(
                    (
                        outcome.hit_rate,
                        outcome.makespan_s,
                        outcome.makespan_s / bound_s,
                        outcome.imbalance,
                    )
                )
            if not found:
                continue
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


def serve(
    model: str, workload: Workload, count: int, router: Any, arrivals_s: Sequence[float]
) -> tuple[Outcome, float]:
    """What becomes of the requests, and what a decision took in seconds.

    Args:
        count: of replicas.
        router: of these and of the costs of a step, chooses.
    """
    costs = scaled(H100, workload)
    with replicas_of(model, workload, count, costs, True) as replicas:
        chosen = Timed(router(replicas, costs))
        outcome = replicas.serve(chosen, arrivals_s)
    return outcome, chosen.taken_s / len(arrivals_s)


def capacity_per_s(model: str, workload: Workload, count: int) -> float:
    """Requests that relay answers in a second if all are there at once."""
    at_once = [0.0] * len(workload.requests)
    outcome, _ = serve(model, workload, count, ONLINE["relay"], at_once)
    return len(at_once) / outcome.makespan_s


def measure_arrivals(
    model: str, options: Namespace, loads: Sequence[tuple[str, float]]
) -> list[Row]:
    """
    Args:
        loads: kinds of arrivals, and parts of the capacity.
    """
    rows: list[Row] = []
    for name in options.workloads:
        make = workloads(options)[name]
        per_s = 0.0
        for kind, load in loads:
            found: dict[str, list[tuple[Outcome, float]]] = {}
            for seed in range(options.rounds):
                workload = make(options.replicas, options.arrivals, seed, 32)
                per_s = per_s or capacity_per_s(model, workload, options.replicas)
                arrivals_s = ARRIVALS[kind](load * per_s, len(workload.requests), seed)
                routers: dict[str, Any] = {**ONLINE, **(WEIGHED if options.weights else {})}
                if kind == "bursts":
                    # what knows a burst; the others know nothing that an oracle would not
                    for locality in (0.0, 20.0):
                        routers[f"oracle {locality}"] = partial(
                            Oracle, arrivals_s=arrivals_s, locality=locality
                        )
                for rule, router in routers.items():
                    one = serve(model, workload, options.replicas, router, arrivals_s)
                    found.setdefault(rule, []).append(one)
            of_rules = [arrivals_row(name, options.replicas, kind, load, *each) for each in
                        found.items()]  # fmt: skip
            oracles = [row for row in of_rules if row["rule"] == "oracle"]
            for row in sorted(oracles, key=lambda row: row["first token p99 ms"])[1:]:
                of_rules.remove(row)
            rows += of_rules
            for row in of_rules:
                print(row, flush=True)
    return rows


def arrivals_row(
    name: str,
    replicas: int,
    kind: str,
    load: float,
    rule: str,
    found: Sequence[tuple[Outcome, float]],
) -> Row:
    outcomes = [outcome for outcome, _ in found]
    first_token_s = [each.first_token_after_s(0.0) for one in outcomes for each in one.courses]
    p50, p99 = np.percentile(first_token_s, (50, 99)).tolist()
    return {
        "requests": name,
        "replicas": replicas,
        "arrivals": kind,
        "load": load,
        "rule": "oracle" if rule.startswith("oracle") else rule,
        "hit rate": statistics.mean(each.hit_rate for each in outcomes),
        "first token p50 ms": 1e3 * p50,
        "first token p99 ms": 1e3 * p99,
        "max over mean load": statistics.mean(each.imbalance for each in outcomes),
        "while they arrive": statistics.mean(each.imbalance_while_arriving for each in outcomes),
        "decision us": 1e6 * statistics.mean(decided_s for _, decided_s in found),
    }


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


def add_stream_goals(result: Result, name: str, rows: Sequence[Row]) -> None:
    by_rule = {row["rule"]: row for row in rows if row["rule"] not in KNOWN_LENGTHS}
    relay = by_rule.pop("relay")
    gap = 100 * (by_rule["sorted first"]["hit rate"] - relay["hit rate"])
    what = f"{name}, streamed"
    result.add_goal(Goal(f"{what}: hit rate below the sorted one's", gap, 3, 1, True, "points"))
    daft = by_rule["Daft"]["makespan s"] / relay["makespan s"]
    result.add_goal(Goal(f"{what}: makespan, Daft's over relay's", daft, 1.3, 1.8))
    best = min(row["makespan s"] for row in by_rule.values()) / relay["makespan s"]
    result.add_goal(Goal(f"{what}: makespan, best rival's over relay's", best, 1.1, 1.25))


def main() -> None:
    parser = argument_parser(__doc__, rounds=3)
    parser.add_argument("--replicas", type=int, default=8, help="(%(default)s)")
    parser.add_argument(
        "--stream-requests",
        type=int,
        default=800,
        help="for each replica; 0 for no streams (%(default)s)",
    )
    kinds = list(dict.fromkeys(kind for kind, _ in LOADS))
    parser.add_argument(
        "--kinds", nargs="+", choices=kinds, default=kinds, help="of arrivals (all)"
    )
    parser.add_argument("--arrivals", type=int, default=250, help="for each replica (%(default)s)")
    parser.add_argument("--workloads", nargs="+", help="(all)")
    parser.add_argument(
        "--weights", action="store_true", help="of arrivals also relay's rule with other weights"
    )
    parser.add_argument(
        "--data", type=Path, metavar="FOLDER", help="with *.jsonl of a trace (made conversations)"
    )
    options = parser.parse_args()
    options.requests = options.replicas * max(options.stream_requests, options.arrivals)
    options.workloads = options.workloads or list(workloads(options))
    if options.smoke:
        options.workloads = ["skewed"]
        options.replicas, options.stream_requests, options.arrivals, options.rounds = 2, 24, 16, 1
    loads = [each for each in LOADS if each[0] in options.kinds]
    result = Result.begin(__file__, __doc__, options)
    with tempfile.TemporaryDirectory(prefix="relay-bench-") as folder:
        model = MODEL.save(Path(folder))
        streams = measure_streams(model, options) if options.stream_requests else []
        arrivals = measure_arrivals(model, options, loads)
    if streams:
        result.add_table("Prompts that stream in (simulated)", streams)
    result.add_table("Requests that arrive one by one (simulated)", arrivals)
    for name in options.workloads:
        if streams:
            add_stream_goals(result, name, [row for row in streams if row["requests"] == name])
        for kind, load in loads:
            by_rule = {
                row["rule"]: row
                for row in arrivals
                if (row["requests"], row["arrivals"], row["load"]) == (name, kind, load)
            }
            p99 = by_rule.pop("relay")["first token p99 ms"]
            oracle = by_rule.pop("oracle", None)
            by_rule = {rule: row for rule, row in by_rule.items() if rule not in WEIGHED}
            ray = by_rule["prefix affinity"]["first token p99 ms"] / p99
            what = f"{name}, {kind}, load {load:g}: p99 to first token"
            result.add_goal(Goal(f"{what}, prefix affinity's over relay's", ray, 1.3, 2))
            best = min(row["first token p99 ms"] for row in by_rule.values()) / p99
            result.add_goal(Goal(f"{what}, best rival's over relay's", best, 1.0, 1.3))
            if oracle is not None:
                room = p99 / oracle["first token p99 ms"]
                result.add_goal(Goal(f"{what}, relay's over the oracle's", room, 1.1, 1.0, True))
    worst = max(
        row["max over mean load"] for row in [*streams, *arrivals] if row["rule"] == "relay"
    )
    result.add_goal(Goal("relay: max over mean load", worst, 1.10, 1.05, True))
    worst = max(row["while they arrive"] for row in arrivals if row["rule"] == "relay")
    result.add_goal(
        Goal("relay: max over mean load while requests arrive", worst, 1.10, 1.05, True)
    )
    slowest = max(row["decision us"] for row in arrivals if row["rule"] == "relay")
    result.add_goal(Goal("relay: a decision", slowest, 100, 25, True, "us"))
    result.end(options)


if __name__ == "__main__":
    main()

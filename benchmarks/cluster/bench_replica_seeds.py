# SPDX-License-Identifier: Apache-2.0
"""8, 32 and 128 replicas in virtual time, with several seeds.

As in `bench_replicas`, with fewer requests for each of more replicas. Requests that arrive one by
one are compared with prefix affinity alone; of the seeds the median is shown, and the worst. Of
requests that are all known, the hit rate is compared with that of one machine that is given all in
the best order, and the makespan with a lower bound: every different block computed once, all
replicas always full, which says little where these have not many more requests than the 64 that
they run at once. Figures are simulated.
"""

import statistics
import tempfile
from argparse import Namespace
from pathlib import Path

import numpy as np

from benchmarks.cluster.bench_replicas import (
    ARRIVALS,
    L4,
    MAX_WAITING,
    capacity_per_s,
    lower_bound_s,
    replicas_of,
    scaled,
    serve,
)
from benchmarks.cluster.rivals import ONLINE, Sorted
from benchmarks.cluster.workloads import repetition, skewed
from benchmarks.scheduler.bench_scheduler import MODEL
from benchmarks.support.formatting import Row
from benchmarks.support.options import argument_parser
from benchmarks.support.result import Goal, Result
from vllm_relay.cluster.rules import Buckets
from vllm_relay.cluster.simulate import Outcome

WORKLOADS = {"repetition": repetition, "skewed": skewed}
LOADS = (("poisson", 0.95), ("bursts", 0.8))
RULES = ("prefix affinity", "relay")
OUTPUT_TOKENS = 32


def p99_ms(outcome: Outcome) -> float:
    first_token_s = [each.first_token_after_s(0.0) for each in outcome.courses]
    return 1e3 * float(np.percentile(first_token_s, 99))


def measure_arrivals(model: str, options: Namespace, count: int, per_replica: int) -> list[Row]:
    rows: list[Row] = []
    for name in options.workloads:
        per_s = 0.0
        for kind, load in LOADS:
            outcomes: dict[str, list[Outcome]] = {rule: [] for rule in RULES}
            for seed in range(options.rounds):
                workload = WORKLOADS[name](count, per_replica, seed, OUTPUT_TOKENS)
                per_s = per_s or capacity_per_s(model, workload, count)
                arrivals_s = ARRIVALS[kind](load * per_s, len(workload.requests), seed)
                for rule, found in outcomes.items():
                    found.append(serve(model, workload, count, ONLINE[rule], arrivals_s)[0])
            rival, relay = ([p99_ms(each) for each in found] for found in outcomes.values())
            over = [each / ours for each, ours in zip(rival, relay, strict=True)]
            balance = [each.imbalance_while_arriving for each in outcomes["relay"]]
            rows.append(
                {
                    "requests": name,
                    "replicas": count,
                    "arrivals": kind,
                    "load": load,
                    "hit rate": statistics.mean(each.hit_rate for each in outcomes["relay"]),
                    "p99 ms, prefix affinity": statistics.median(rival),
                    "p99 ms, relay": statistics.median(relay),
                    "over relay's": statistics.median(over),
                    "worst seed": min(over),
                    "max over mean load": max(balance),
                }
            )
            print(rows[-1], flush=True)
    return rows


def measure_known(model: str, options: Namespace, count: int, per_replica: int) -> list[Row]:
    rows: list[Row] = []
    for name in options.workloads:
        below, makespans_s, over_bound, balance = [], [], [], []
        for seed in range(options.rounds):
            workload = WORKLOADS[name](count, per_replica, seed, OUTPUT_TOKENS)
            costs = scaled(L4, workload)
            with replicas_of(model, workload, 1, costs, False) as one:
                best = one.run(Sorted(one), MAX_WAITING)
            with replicas_of(model, workload, count, costs, False) as replicas:
                outcome = replicas.run(Buckets(replicas, len(workload.requests)), MAX_WAITING)
                bound_s = lower_bound_s(replicas, costs)
            below.append(100 * (best.hit_rate - outcome.hit_rate))
            makespans_s.append(outcome.makespan_s)
            over_bound.append(outcome.makespan_s / bound_s)
            balance.append(outcome.imbalance)
        rows.append(
            {
                "requests": name,
                "replicas": count,
                "hit rate": outcome.hit_rate,
                "points below one machine's": statistics.median(below),
                "worst seed, points": max(below),
                "makespan s": statistics.median(makespans_s),
                "over lower bound": statistics.median(over_bound),
                "worst seed": max(over_bound),
                "max over mean load": max(balance),
            }
        )
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argument_parser(__doc__, rounds=5)
    parser.add_argument(
        "--replicas", type=int, nargs="+", default=[8, 32, 128], help="(%(default)s)"
    )
    per_replica = "for each replica, by their number; 0 for none (%(default)s)"
    parser.add_argument("--arrivals", type=int, nargs="+", default=[100, 50, 20], help=per_replica)
    parser.add_argument("--known", type=int, nargs="+", default=[400, 200, 100], help=per_replica)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    options = parser.parse_args()
    if options.smoke:
        options.replicas, options.arrivals, options.known = [2], [16], [24]
        options.workloads, options.rounds = ["skewed"], 1
    result = Result.begin(__file__, __doc__, options)
    arrivals: list[Row] = []
    known: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="relay-bench-") as folder:
        model = MODEL.save(Path(folder))
        for count, of_arrivals, of_known in zip(
            options.replicas, options.arrivals, options.known, strict=True
        ):
            if of_arrivals:
                arrivals += measure_arrivals(model, options, count, of_arrivals)
            if of_known:
                known += measure_known(model, options, count, of_known)
    if arrivals:
        result.add_table("Requests that arrive one by one (simulated)", arrivals)
    if known:
        result.add_table("Requests that are all known (simulated)", known)
    for count in options.replicas:
        for kind, load in LOADS:
            found = [
                row
                for row in arrivals
                if (row["replicas"], row["arrivals"], row["load"]) == (count, kind, load)
            ]
            if found:
                least = min(row["over relay's"] for row in found)
                what = f"{count} replicas, {kind}, load {load:g}: p99 to first token"
                result.add_goal(Goal(f"{what}, prefix affinity's over relay's", least, 1.3, 2))
        found = [row for row in known if row["replicas"] == count]
        if found:
            most = max(row["worst seed, points"] for row in found)
            goal = f"{count} replicas, all known: hit rate below one machine's"
            result.add_goal(Goal(goal, most, 0.5, 0.1, True, "points"))
            most = max(row["worst seed"] for row in found)
            goal = f"{count} replicas, all known: makespan over the lower bound"
            result.add_goal(Goal(goal, most, 1.10, 1.03, True))
    for what, rows in (("requests arrive", arrivals), ("requests are known", known)):
        if rows:
            worst = max(row["max over mean load"] for row in rows)
            result.add_goal(Goal(f"relay: max over mean load, {what}", worst, 1.10, 1.05, True))
    result.end(options)


if __name__ == "__main__":
    main()

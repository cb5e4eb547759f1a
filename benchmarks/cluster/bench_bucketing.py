# SPDX-License-Identifier: Apache-2.0
"""Dynamic prefix bucketing (Wang, 2025): its experiment in virtual time, by buffer and bucket size.

Prompts of 512 tokens, half of them one of 512 prefixes, in random order, with 128 tokens of answer
from an 8B model on L4s, as there, and fewer prompts for each replica. Nothing waits for a sort
here; theirs took time. Published figures are of 128 GPUs and 200,000 prompts; no more than half of
the prompt tokens can be found again, so that a higher rate counts some twice. All others are
simulated.
"""

import tempfile
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.cluster.bench_replicas import L4, MAX_WAITING, lower_bound_s, replicas_of
from benchmarks.cluster.rivals import DaftBuckets, Sorted
from benchmarks.cluster.workloads import repetition
from benchmarks.scheduler.bench_scheduler import MODEL
from benchmarks.support.formatting import Row
from benchmarks.support.options import argument_parser
from benchmarks.support.result import Goal, Result
from vllm_relay.cluster.rules import Buckets, NextInLine
from vllm_relay.cluster.simulate import OfflineSource, SimulatedReplicas

NUM_PREFIXES = 512
Source = Callable[[SimulatedReplicas], OfflineSource]

RULES: dict[str, tuple[Source, tuple[float, float]]] = {
    "next to whoever has room": (NextInLine, (869, 0.265)),
    "sorted first": (Sorted, (563, 0.545)),
    "Daft": (DaftBuckets, (482, 0.540)),
}
"""With the seconds and hit rates that are published."""
RELAY = "relay"
BUFFERS = (128, 512, 2048, 5000)
LEAST_BUCKETS = (1, 16, 64)


def measure(model: str, num_replicas: int, options: Namespace, source: Source) -> Row:
    """Of one rule; a bucket size or a buffer is the source's."""
    workload = repetition(num_replicas, options.requests, 0, options.output_tokens, NUM_PREFIXES)
    with replicas_of(model, workload, num_replicas, L4, False) as replicas:
        outcome = replicas.run(source(replicas), MAX_WAITING)
        bound_s = lower_bound_s(replicas, L4)
    return {
        "hit rate": outcome.hit_rate,
        "makespan s": outcome.makespan_s,
        "over lower bound": outcome.makespan_s / bound_s,
        "max over mean load": outcome.imbalance,
    }


def measure_rules(model: str, options: Namespace) -> list[Row]:
    rows: list[Row] = []
    sources = {rule: source for rule, (source, _) in RULES.items()} | {RELAY: Buckets}
    for rule, source in sources.items():
        row = {"rule": rule} | measure(model, options.replicas, options, source)
        seconds, hit_rate = RULES[rule][1] if rule in RULES else (None, None)
        rows.append(row | {"published s": seconds, "published hit rate": hit_rate})
        print(rows[-1], flush=True)
    return rows


def measure_sizes(model: str, options: Namespace) -> list[Row]:
    rows: list[Row] = []
    for buffer in options.buffers:
        sources: dict[tuple[str, int | None], Source] = {
            (RELAY, None): partial(Buckets, max_buffered=buffer)
        }
        for least in options.least_buckets:
            daft = partial(DaftBuckets, max_buffered=buffer, least=least)
            sources["Daft", least] = daft
        for (rule, least), source in sources.items():
            found = measure(model, options.sweep_replicas, options, source)
            rows.append({"buffer": buffer, "rule": rule, "least bucket": least} | found)
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argument_parser(__doc__, rounds=1)
    parser.add_argument("--replicas", type=int, default=128, help="(%(default)s)")
    parser.add_argument(
        "--sweep-replicas", type=int, default=16, help="where buffers vary (%(default)s)"
    )
    parser.add_argument("--requests", type=int, default=400, help="for each replica (%(default)s)")
    options = parser.parse_args()
    options.output_tokens, options.buffers, options.least_buckets = 128, BUFFERS, LEAST_BUCKETS
    if options.smoke:
        options.replicas = options.sweep_replicas = 2
        options.requests, options.output_tokens = 24, 8
        options.buffers, options.least_buckets = BUFFERS[:1], LEAST_BUCKETS[:1]
    result = Result.begin(__file__, __doc__, options)
    with tempfile.TemporaryDirectory(prefix="relay-bench-") as folder:
        model = MODEL.save(Path(folder))
        rules = measure_rules(model, options)
        sizes = measure_sizes(model, options)
    replicas = f"{options.replicas} replicas, {options.requests} prompts each"
    result.add_table(f"Rules: {replicas} (simulated)", rules)
    replicas = f"{options.sweep_replicas} replicas, {options.requests} prompts each"
    result.add_table(f"Buffers and buckets: {replicas} (simulated)", sizes)
    by_rule = {row["rule"]: row for row in rules}
    relay = by_rule.pop(RELAY)
    gap = 100 * (by_rule["sorted first"]["hit rate"] - relay["hit rate"])
    result.add_goal(Goal("hit rate below the sorted one's", gap, 3, 1, True, "points"))
    over_bound = relay["over lower bound"]
    result.add_goal(Goal("makespan over the lower bound", over_bound, 1.1, 1.03, True))
    daft = by_rule["Daft"]["makespan s"] / relay["makespan s"]
    result.add_goal(Goal("makespan, Daft's over relay's", daft, 1.3, 1.8))
    result.end(options)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Which index and width to take: the planner's choice against the best of all, found by measuring.

A cell is a kind of head, a context length and how much of the context is reused. In each, every
index is searched with ranges and top-k at every width that may do; the best is the fastest whose
attention output is off by at most the target for 99% of the queries, against float64. The planner
sees profile and measured curves of other queries of the same prefix, as many as a stored context
keeps for it, and costs that were measured in this process. Times are CPU times of one thread for
one group of query heads, search and attention.

Best and planner are judged by the same test queries, and the best is chosen with hindsight. So
these are four times as many as those of a profile: of 200 tokens alone, the p99 is uncertain by a
tenth for heads with long tails, the best would be what was lucky with these, and a good choice
would miss the target as often as not.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.sparse.best_way import Cell, Measured, Way
from benchmarks.sparse.heads.corpus import KINDS, Head, make_head
from benchmarks.sparse.index_timing import with_times
from benchmarks.sparse.paper_rules import plan_by_rules
from benchmarks.support.formatting import Row
from benchmarks.support.options import argument_parser
from benchmarks.support.result import Goal, Result
from vllm_relay.sparse import CoarseIndex, FlatIndex, GraphIndex
from vllm_relay.sparse.index.compiled_index import CompiledIndex
from vllm_relay.sparse.index.elements import Elements, from_float32
from vllm_relay.sparse.plan.cost_calibration import SIZES, calibrate_costs
from vllm_relay.sparse.plan.head_profile import HeadProfile, profile_head
from vllm_relay.sparse.plan.index_measure import exact_attention, measure_full, measure_index
from vllm_relay.sparse.plan.planner import Plan, plan
from vllm_relay.sparse.plan.prefix_planner import PROFILE_TOKENS
from vllm_relay.sparse.plan.search_cost import SearchCost

REUSES = (1.0, 0.5, 0.2)
PROFILE_EVERY = 5
"""One token in so many is for the profile, the others are for the test."""
TOKENS = PROFILE_EVERY * PROFILE_TOKENS
HEADS = 4


@dataclass(frozen=True)
class Built:
    """A head of one length and all that was built over it; of each prefix, the profile."""

    kind: str
    head: Head
    keys: Elements
    values: Elements
    indexes: dict[str, CompiledIndex]

    def profile(self, head: Head) -> HeadProfile:
        keys, values = (part.rows(0, head.prefix_len) for part in (self.keys, self.values))
        return profile_head(keys, profile_queries(head), values, scale=head.scale)

    def measured(self, head: Head, profile: HeadProfile, max_error: float) -> HeadProfile:
        """With what the indexes find."""
        keys, values = (part.rows(0, head.prefix_len) for part in (self.keys, self.values))
        exact = exact_attention(keys, values, profile_queries(head), head.scale)
        searches = [measure_full(head.prefix_len, HEADS)]
        for index in self.indexes.values():
            searches += measure_index(
                index, self.values, exact, profile.promising(max_error), scale=head.scale,
                prefix_len=head.prefix_len, max_error=max_error,
            )  # fmt: skip
        timed = with_times(
            searches, list(self.indexes.values()), self.keys, self.values, exact.queries,
            scale=head.scale, prefix_len=head.prefix_len, max_error=max_error,
        )  # fmt: skip
        return profile.with_searches(timed)


def make(kind: str, length: int, tokens: int, reuse: float = 1.0) -> Head:
    return make_head(
        kind, keys=length, train=round(0.4 * length), tests=tokens, heads=HEADS, reuse=reuse
    )


def profile_queries(head: Head) -> np.ndarray:
    return np.ascontiguousarray(head.queries[::PROFILE_EVERY])


def test_queries(head: Head) -> np.ndarray:
    """Those that the profile has not seen."""
    is_test = np.arange(len(head.queries)) % PROFILE_EVERY != 0
    return np.ascontiguousarray(head.queries[is_test])


def build(kind: str, length: int, tokens: int) -> Built:
    head = make(kind, length, tokens)
    keys, values = from_float32(head.keys, "bfloat16"), from_float32(head.values, "bfloat16")
    indexes: dict[str, CompiledIndex] = {
        index_class.kind: index_class().build(keys, head.train_queries, threads=1)
        for index_class in (FlatIndex, CoarseIndex, GraphIndex)
    }
    return Built(kind, head, keys, values, indexes)


def described(way: Way) -> str:
    kind, query = way
    if query is None:
        return kind
    asked = f"top {query.k}" if hasattr(query, "k") else f"{query.alpha:g}"
    return f"{kind} {asked}" + (f" w{query.width}" if query.width else "")


def excess(chosen: Measured, best: Measured, max_error: float) -> float:
    """Time over that of the best, as a fraction of it; infinite where quality is missed."""
    if chosen.error_p99 > max_error:
        return float("inf")
    if chosen is best:
        return 0.0
    pairs = zip(chosen.cpu_s, best.cpu_s, strict=True)
    return float(np.median([a / b for a, b in pairs])) - 1


def cell_plans(
    built: Built, profile: HeadProfile, measured: HeadProfile, max_error: float, costs: SearchCost
) -> dict[str, Plan]:
    """The planner, knowing what the indexes find and take; with times by the cost model; knowing
    nothing of indexes; and the paper's rules without and with memory for a coarse index. A "flat"
    head is one of a first layer."""
    n, prefix_len = built.head.num_keys, profile.prefix_len
    untimed = measured.with_searches([replace(s, time_us=None) for s in measured.searches])
    layer = 0 if built.kind == "flat" else 1
    return {
        "planner": plan(n, prefix_len, measured, max_error=max_error, costs=costs),
        "by model": plan(n, prefix_len, untimed, max_error=max_error, costs=costs),
        "unbuilt": plan(n, prefix_len, profile, max_error=max_error, costs=costs),
        "rules": plan_by_rules(n, prefix_len, profile, costs, layer=layer),
        "rules, memory": plan_by_rules(n, prefix_len, profile, costs, 1 << 40, layer=layer),
    }


def cell_row(
    built: Built, reuse: float, plans: dict[str, Plan], found: dict[Way, Measured], max_error: float
) -> Row:
    best = min((m for m in found.values() if m.error_p99 <= max_error), key=lambda m: m.us)
    row: Row = {
        "head": built.kind, "keys": built.head.num_keys, "reuse": reuse, "target": max_error,
        "best": described(best.way), "best us": best.us, "best error": best.error_p99,
    }  # fmt: skip
    for name, each in plans.items():
        chosen = found[each.kind, each.query]
        row[name] = described(chosen.way)
        row[f"{name} us"] = chosen.us
        row[f"{name} error"] = chosen.error_p99
        row[f"{name} over"] = excess(chosen, best, max_error)
    row["expected us"] = plans["planner"].chosen.expected_us
    return row


def summary(rows: list[Row], name: str, target: float) -> Row:
    overs = np.array([row[f"{name} over"] for row in rows if row["target"] == target])
    return {
        "who": name, "target": target, "cells": len(overs),
        "within 10%": float(np.mean(overs <= 0.10)),
        "within 15%": float(np.mean(overs <= 0.15)),
        "good enough": float(np.mean(np.isfinite(overs))),
    }  # fmt: skip


def main() -> None:
    parser = argument_parser(__doc__, rounds=5)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384, 65536])
    parser.add_argument("--kinds", nargs="+", default=[k for k in KINDS if k != "one_key"])
    parser.add_argument("--reuses", type=float, nargs="+", default=list(REUSES))
    parser.add_argument("--targets", type=float, nargs="+", default=[0.01, 0.1])
    options = parser.parse_args()
    # those that the lengths lie between
    sizes = SIZES[: 1 + sum(size < max(options.lengths) for size in SIZES[:-1])]
    tokens = TOKENS
    if options.smoke:
        options.lengths, options.rounds, sizes, tokens = [2048], 1, (512, 2048), 5 * PROFILE_EVERY
        options.kinds, options.reuses = ["rope", "flat"], [1.0, 0.2]
    result = Result.begin(__file__, __doc__, options)
    costs = calibrate_costs(sizes=sizes, store=False)
    rows: list[Row] = []
    for kind in options.kinds:
        for length in options.lengths:
            built = build(kind, length, tokens)
            for reuse in options.reuses:
                head = make(kind, length, tokens, reuse)
                profile = built.profile(head)
                cell = Cell(head, built.keys, built.values, built.indexes, test_queries(head))
                for target in options.targets:
                    measured = built.measured(head, profile, target)
                    plans = cell_plans(built, profile, measured, target, costs)
                    chosen = [(each.kind, each.query) for each in plans.values()]
                    found = cell.measure(target, chosen, options.rounds)
                    rows.append(cell_row(built, reuse, plans, found, target))
            print(f"{kind}, {length} keys: done", file=sys.stderr, flush=True)
    result.add_table(
        "Cells", rows, "over: time over the best, as a fraction; inf: error above the target"
    )
    shares = [
        summary(rows, name, target)
        for target in options.targets
        for name in ("planner", "by model", "unbuilt", "rules", "rules, memory")
    ]
    result.add_table("Cells near the best", shares)
    for share in shares:
        if share["who"] == "planner":
            at = f"of cells near the best way, error {share['target']:.0%}"
            result.add_goal(Goal(f"within 15% {at}", share["within 15%"], 0.90, unit=""))
            result.add_goal(Goal(f"within 10% {at}", share["within 10%"], None, 0.95, unit=""))
    result.end(options)


if __name__ == "__main__":
    main()

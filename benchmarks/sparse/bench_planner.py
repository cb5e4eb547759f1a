# SPDX-License-Identifier: Apache-2.0
"""Which index and width to take: the planner's choice against the best of all, found by measuring.

A cell is a kind of head, a context length and how much of the context is reused. In each, every
index is searched with ranges and top-k at every width that may do; the best is the fastest whose
attention output is off by at most the target for 99% of the queries, against float64. The planner
sees other queries of the same prefix, as many as a stored context keeps for it, and costs that were
measured in this process. Times are CPU times of one thread for one group of query heads, search and
attention.

Best and planner are judged by the same test queries, and the best is chosen with hindsight. So
these are four times as many as those of a sample: of 200 tokens alone, the p99 is uncertain by a
tenth for heads with long tails, the best would be what was lucky with these, and a good choice
would miss the target as often as not. What was the best with hindsight may miss all that the next
query looks for; a plan reads everything, or computes for every query how much it leaves out.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np

from benchmarks.sparse.best_way import Cell, Measured, Way
from benchmarks.sparse.heads.corpus import KINDS, Head, make_head
from benchmarks.sparse.paper_rules import way_by_rules
from benchmarks.support.formatting import Row
from benchmarks.support.options import argument_parser
from benchmarks.support.result import Goal, Result
from vllm_relay.sparse import CoarseIndex, FlatIndex, GraphIndex
from vllm_relay.sparse.index.compiled_index import CompiledIndex
from vllm_relay.sparse.index.elements import Elements, from_float32
from vllm_relay.sparse.plan.cost_calibration import SIZES, calibrate_costs
from vllm_relay.sparse.plan.head_sample import HeadSample
from vllm_relay.sparse.plan.index_choice import SAMPLE_TOKENS, fastest, ways_to_keep_error
from vllm_relay.sparse.plan.search_cost import SearchCost

REUSES = (1.0, 0.5, 0.2)
SAMPLE_EVERY = 5
"""One token in so many is for the sample, the others are for the test."""
TOKENS = SAMPLE_EVERY * SAMPLE_TOKENS
HEADS = 4


@dataclass(frozen=True)
class Built:
    """A head of one length and all that was built over it."""

    kind: str
    head: Head
    keys: Elements
    values: Elements
    indexes: dict[str, CompiledIndex]

    def sample(self, head: Head) -> HeadSample:
        """Of the prefix that the queries of `head` see."""
        return HeadSample(self.keys, self.values, sample_queries(head), head.prefix_len, head.scale)


def make(kind: str, length: int, tokens: int, reuse: float = 1.0) -> Head:
    return make_head(
        kind, keys=length, train=round(0.4 * length), tests=tokens, heads=HEADS, reuse=reuse
    )


def sample_queries(head: Head) -> np.ndarray:
    return np.ascontiguousarray(head.queries[::SAMPLE_EVERY])


def test_queries(head: Head) -> np.ndarray:
    """Those that no plan has seen."""
    is_test = np.arange(len(head.queries)) % SAMPLE_EVERY != 0
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
    if query.max_dropped_mass is not None:
        asked = f"all but {query.max_dropped_mass:g}"
    return f"{kind} {asked}" + (f" w{query.width}" if query.width else "")


def excess(chosen: Measured, best: Measured, max_error: float) -> float:
    """Time over that of the best, as a fraction of it; infinite where quality is missed."""
    if chosen.error_p99 > max_error:
        return float("inf")
    if chosen is best:
        return 0.0
    pairs = zip(chosen.cpu_s, best.cpu_s, strict=True)
    return float(np.median([a / b for a, b in pairs])) - 1


def cell_ways(
    built: Built, head: Head, sample: HeadSample, max_error: float, costs: SearchCost
) -> tuple[dict[str, Way], float]:
    """What the planner takes, and the paper's rules without and with memory for a coarse index; and
    how long the planner expects it to take. A "flat" head is one of a first layer."""
    flat = built.indexes["flat"]
    assert isinstance(flat, FlatIndex)
    planned = fastest(ways_to_keep_error(sample, flat, max_error, costs))
    layer = 0 if built.kind == "flat" else 1
    ways = {
        "planner": (planned.kind, planned.query),
        "rules": way_by_rules(head.prefix_len, layer=layer),
        "rules, memory": way_by_rules(head.prefix_len, layer=layer, has_memory=True),
    }
    return ways, planned.expected_us


def cell_row(
    built: Built,
    reuse: float,
    ways: dict[str, Way],
    expected_us: float,
    found: dict[Way, Measured],
    max_error: float,
) -> Row:
    best = min((m for m in found.values() if m.error_p99 <= max_error), key=lambda m: m.us)
    row: Row = {
        "head": built.kind, "keys": built.head.num_keys, "reuse": reuse, "target": max_error,
        "best": described(best.way), "best us": best.us, "best error": best.error_p99,
    }  # fmt: skip
    for name, way in ways.items():
        chosen = found[way]
        row[name] = described(chosen.way)
        row[f"{name} us"] = chosen.us
        row[f"{name} error"] = chosen.error_p99
        row[f"{name} over"] = excess(chosen, best, max_error)
    row["expected us"] = expected_us
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
        options.lengths, options.rounds, sizes, tokens = [2048], 1, (512, 2048), 5 * SAMPLE_EVERY
        options.kinds, options.reuses = ["rope", "flat"], [1.0, 0.2]
    result = Result.begin(__file__, __doc__, options)
    costs = calibrate_costs(sizes=sizes, store=False)
    rows: list[Row] = []
    for kind in options.kinds:
        for length in options.lengths:
            built = build(kind, length, tokens)
            for reuse in options.reuses:
                head = make(kind, length, tokens, reuse)
                sample = built.sample(head)
                cell = Cell(head, built.keys, built.values, built.indexes, test_queries(head))
                for target in options.targets:
                    ways, expected_us = cell_ways(built, head, sample, target, costs)
                    found = cell.measure(target, ways.values(), options.rounds)
                    rows.append(cell_row(built, reuse, ways, expected_us, found, target))
            print(f"{kind}, {length} keys: done", file=sys.stderr, flush=True)
    result.add_table(
        "Cells", rows, "over: time over the best, as a fraction; inf: error above the target"
    )
    shares = [
        summary(rows, name, target)
        for target in options.targets
        for name in ("planner", "rules", "rules, memory")
    ]
    result.add_table("Cells near the best", shares)
    for share in shares:
        if share["who"] == "planner":
            kept = f"of cells that keep an error of {share['target']:.0%}"
            result.add_goal(Goal(kept, share["good enough"], 1.0, unit=""))
            at = f"of cells near the best way, error {share['target']:.0%}"
            result.add_goal(Goal(f"within 15% {at}", share["within 15%"], 0.90, unit=""))
            result.add_goal(Goal(f"within 10% {at}", share["within 10%"], None, 0.95, unit=""))
    result.end(options)


if __name__ == "__main__":
    main()

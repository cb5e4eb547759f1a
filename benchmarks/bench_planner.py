# SPDX-License-Identifier: Apache-2.0
"""Which index and width to take: the planner's choice against the best of all, found by measuring.

A cell is a kind of head, a context length and how much of the context is reused. In each, every
index is searched with ranges and top-k at every width that may do; the best is the fastest whose
attention output is off by at most the target for 99% of the queries, against float64. The planner
sees profile and measured curves of other queries of the same prefix, and costs that were measured
in this process. Times are CPU times of one thread for one group of query heads, search and
attention.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from benchmarks.common import Goal, Result, Row, Timing, argument_parser
from benchmarks.sparse.head_corpus import KINDS, Head, make_head
from vllm_relay.sparse import CoarseIndex, FlatIndex, GraphIndex, QueryType
from vllm_relay.sparse.attention import SparseLayer, attend
from vllm_relay.sparse.cost_calibration import SIZES, calibrate_costs
from vllm_relay.sparse.elements import Elements, from_float32
from vllm_relay.sparse.face import CompiledIndex, with_width
from vllm_relay.sparse.head_profile import ExactAnswer, HeadProfile, profile_head
from vllm_relay.sparse.index_measure import exact_attention, measure_full, measure_index, widths
from vllm_relay.sparse.planner import Plan, plan, plan_by_rules
from vllm_relay.sparse.search_cost import SearchCost

REUSES = (1.0, 0.5, 0.2)
TOKENS, WARM_UP_TOKENS = 144, 4
PROFILE_EVERY = 3
"""One token in so many is for the profile, the others are for the test."""
HEADS = 4
FIRST_TOKENS, HOPELESS = 8, 10.0
"""Ways that are this many times above the target on the first queries are not looked at further."""
Way = tuple[str, QueryType | None]


@dataclass
class Measured:
    """One way in one cell.

    Attributes:
        error_p99: of the attention output.
        cpu_s: of one group, in every round.
    """

    way: Way
    run: Callable[[np.ndarray], np.ndarray]
    error_p99: float
    cpu_s: list[float] = field(default_factory=list)

    @property
    def us(self) -> float:
        return Timing(self.cpu_s).median_s * 1e6


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
        searches = [measure_full(keys, values, exact, head.scale)]
        for index in self.indexes.values():
            searches += measure_index(
                index, self.values, exact, profile.promising(max_error), scale=head.scale,
                prefix_len=head.prefix_len, max_error=max_error, is_timed=True,
            )  # fmt: skip
        return profile.with_searches(searches)


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


def runner(built: Built, way: Way, prefix_len: int) -> Callable[[np.ndarray], np.ndarray]:
    """Attention [heads, d] of a group of queries."""
    kind, query = way
    scale = built.head.scale
    if query is None:
        keys, values = built.keys.rows(0, prefix_len), built.values.rows(0, prefix_len)
        everything = [np.arange(prefix_len, dtype=np.int32)] * HEADS
        return lambda rows: attend(rows, keys, values, everything, scale).output
    layer = SparseLayer([built.indexes[kind]], [built.values])
    prefix = prefix_len if prefix_len < built.keys.shape[0] else None

    def run(rows: np.ndarray) -> np.ndarray:
        state, _ = layer.attend(rows[None], query, scale=scale, prefix_len=prefix, threads=1)
        return state.output[0]

    return run


def float64_outputs(built: Built, queries: np.ndarray, prefix_len: int) -> np.ndarray:
    keys = built.keys.rows(0, prefix_len).to_float32().astype(np.float64)
    values = built.values.rows(0, prefix_len).to_float32().astype(np.float64)
    outputs = []
    for rows in queries:
        logits = (rows.astype(np.float64) * built.head.scale) @ keys.T
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        outputs.append((weights @ values) / weights.sum(axis=1, keepdims=True))
    return np.stack(outputs)


def ways(built: Built, exact_answers: tuple[ExactAnswer, ...]) -> Iterator[list[Way]]:
    """For each index and query type its widths, rising. Query types whose exact answer is not
    good enough for the test queries themselves are left out."""
    for kind, index in built.indexes.items():
        for answer in exact_answers:
            yield [(kind, with_width(answer.query, width)) for width in widths(index)]


def measure_cell(
    built: Built, head: Head, max_error: float, plans: dict[str, Plan], rounds: int
) -> dict[Way, Measured]:
    queries, prefix_len = test_queries(head), head.prefix_len
    truth = float64_outputs(built, queries, prefix_len)
    lengths = np.linalg.norm(truth, axis=2)
    measured: dict[Way, Measured] = {}

    def add(way: Way) -> Measured:
        if way not in measured:
            run = runner(built, way, prefix_len)
            error_p99 = 0.0
            for tokens in (slice(FIRST_TOKENS), slice(None)):
                outputs = np.stack([run(rows) for rows in queries[tokens]])
                errors = np.linalg.norm(outputs - truth[tokens], axis=2) / lengths[tokens]
                error_p99 = float(np.quantile(errors, 0.99))
                if error_p99 > HOPELESS * max_error:
                    break
            measured[way] = Measured(way, run, error_p99)
        return measured[way]

    seen = profile_head(
        built.keys.rows(0, prefix_len), queries, built.values.rows(0, prefix_len),
        scale=built.head.scale,
    )  # fmt: skip
    add(("full", None))
    for each in plans.values():
        add((each.kind, each.query))
    for rising in ways(built, seen.promising(max_error)):
        good = 0
        for way in rising:
            search = add(way)
            good += search.error_p99 <= max_error
            # wider ones are slower and were good enough before
            if good == 2 or way[1] is not None and (way[1].width or 0) > prefix_len:
                break
    timed = [m for m in measured.values() if m.error_p99 <= max_error]
    timed += [measured[p.kind, p.query] for p in plans.values()]
    timed = list({m.way: m for m in timed}.values())
    for number in range(rounds + 1):
        for each in timed[:: -1 if number % 2 else 1]:
            for rows in queries[:WARM_UP_TOKENS]:
                each.run(rows)
            began_s = time.thread_time()
            for rows in queries:
                each.run(rows)
            if number:
                each.cpu_s.append((time.thread_time() - began_s) / len(queries))
    return {m.way: m for m in timed}


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
        "rules": plan_by_rules(n, prefix_len, profile, layer=layer, costs=costs),
        "rules, memory": plan_by_rules(n, prefix_len, profile, 1 << 40, layer=layer, costs=costs),
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
    sizes, tokens = SIZES, TOKENS
    if options.smoke:
        options.lengths, options.rounds, sizes, tokens = [2048], 1, (512, 2048), 24
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
                for target in options.targets:
                    measured = built.measured(head, profile, target)
                    plans = cell_plans(built, profile, measured, target, costs)
                    found = measure_cell(built, head, target, plans, options.rounds)
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

# SPDX-License-Identifier: Apache-2.0
"""What building a graph costs: CPU time of all threads, and of its first half, the nearest keys.

Keys and training queries of made heads (`benchmarks/sparse/heads/corpus.py`). "recall" is that of
the 100 nearest keys of some of the training queries, by products in float32; "reachable" are the
keys a search can get to.
"""

import statistics
import time

import numpy as np

from benchmarks.sparse.heads.corpus import make_head
from benchmarks.sparse.heads.sets import SEED, SEED_OF_KIND
from benchmarks.sparse.searches import exact
from benchmarks.support.formatting import Row
from benchmarks.support.options import argument_parser
from benchmarks.support.result import Goal, Result
from vllm_relay.sparse import GraphIndex
from vllm_relay.sparse.index.elements import as_elements
from vllm_relay.sparse.index.key_codes import encode
from vllm_relay.sparse.index.nearest import nearest_keys

KINDS = ("rope", "hubs")
NEAREST, CHECKED_QUERIES = 100, 500


def measure(kind: str, num_keys: int, num_queries: int, rounds: int, threads: int) -> Row:
    head = make_head(
        kind, keys=num_keys, train=num_queries, tests=1, seed=SEED_OF_KIND.get(kind, SEED)
    )
    keys, k = as_elements("keys", head.keys), min(NEAREST, num_keys)
    codes, rows = encode(keys, threads)
    nearest_s, build_s = [], []
    for _ in range(rounds):
        began_s = time.process_time()
        nearest = nearest_keys(keys, codes, rows, head.train_queries, k, threads=threads)
        nearest_s.append(time.process_time() - began_s)
        began_s = time.process_time()
        index = GraphIndex().build(keys, head.train_queries, threads=threads)
        build_s.append(time.process_time() - began_s)
    checked = head.train_queries[:CHECKED_QUERIES]
    truth = exact.top_k(checked, head.keys, k)
    found = list(nearest[:CHECKED_QUERIES])
    return {
        "head": kind,
        "keys": num_keys,
        "training queries": num_queries,
        "nearest keys, CPU s": statistics.median(nearest_s),
        "recall": float(np.mean(exact.recall(found, checked, head.keys, truth))),
        "build, CPU s": statistics.median(build_s),
        "reachable": float(index.reachable().mean()),
    }


def main() -> None:
    parser = argument_parser(__doc__, rounds=3)
    parser.add_argument("--keys", type=int, default=100_000, help="(%(default)s)")
    parser.add_argument("--train", type=int, default=40_000, help="(%(default)s)")
    options = parser.parse_args()
    result = Result.begin(__file__, __doc__, options)
    if options.smoke:
        options.keys, options.train, options.rounds = 1000, 300, 1
    rows = [
        measure(kind, options.keys, options.train, options.rounds, options.threads)
        for kind in KINDS
    ]
    result.add_table("Graphs, built", rows)
    for row in rows:
        name = f"{row['head']}, {row['keys']:,} keys: "
        for what, bar, aim in (("nearest keys, CPU s", 4, 2.5), ("build, CPU s", 16, 8)):
            goal = Goal(f"{name}{what}", row[what], bar, aim, lower_is_better=True, unit="")
            result.add_goal(goal)
        for what, bar in (("recall", 0.99), ("reachable", 1.0)):
            result.add_goal(Goal(f"{name}{what}", row[what], bar, bar, unit=""))
    result.end(options)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""One attention layer of a decode step over a stored context: graph against a scan of all keys.

32 query heads on 8 kv heads of size 128, keys and values in bfloat16, on two cores. Every kv head
has keys, values and an index of its own up to `--heads` of them; the rest repeat these with other
queries. The rival is our own exact scan of eight-bit codes, not a scan of bfloat16 keys. "mass" is
the part of the attention weight of the true `Dipr` range that was found; "error" is the relative L2
error of the output against attention over all keys in float64.
"""

import argparse
import time
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from benchmarks.sparse.heads.corpus import Head, make_head
from benchmarks.support.formatting import Row
from benchmarks.support.options import argument_parser
from benchmarks.support.result import Goal, Result
from benchmarks.support.timing import interleaved, ratio
from tests.support import reference
from vllm_relay.sparse import Dipr, FlatIndex, GraphIndex, QueryType, TopK
from vllm_relay.sparse.index.compiled_index import CompiledIndex
from vllm_relay.sparse.index.elements import as_elements, from_float32
from vllm_relay.sparse.index.sparse_layer import SparseLayer, attend

NUM_KV_HEADS, GROUP, HEAD_SIZE = 8, 4, 128
HEAD_NOISE = 0.25
BARS = {131_072: (5.0, 10.0), 1_048_576: (12.0, 30.0)}
WIDTHS = (100, 150, 200, 300, 400, 600, 800)
TARGET = 0.98
RANGE = 50.0


@dataclass
class Layer:
    """Both contenders over the same keys, and the queries of every step."""

    heads: list[Head]
    graph: SparseLayer
    flat: SparseLayer
    queries: np.ndarray  # [steps, kv_heads, group, head_size]


def build(num_keys: int, options: argparse.Namespace) -> tuple[Layer, Row]:
    heads = [
        make_head(
            options.kind,
            keys=num_keys,
            train=min(int(0.4 * num_keys), options.train),
            tests=options.steps,
            heads=GROUP,
            head_noise=HEAD_NOISE,
            seed=seed,
        )
        for seed in range(options.heads)
    ]
    graphs, flats, values = [], [], []
    began_s = time.process_time()
    for head in heads:
        keys = from_float32(head.keys, "bfloat16")
        graphs.append(GraphIndex().build(keys, head.train_queries, threads=options.threads))
        flats.append(FlatIndex().build(keys, threads=options.threads))
        values.append(from_float32(head.values, "bfloat16"))
    built_s = (time.process_time() - began_s) / len(heads)
    at = [i % len(heads) for i in range(NUM_KV_HEADS)]
    queries = np.stack(
        [np.roll(heads[h].queries, i // len(heads), axis=0) for i, h in enumerate(at)], axis=1
    )
    layer = Layer(
        heads,
        SparseLayer([graphs[h] for h in at], [values[h] for h in at]),
        SparseLayer([flats[h] for h in at], [values[h] for h in at]),
        np.ascontiguousarray(queries),
    )
    return layer, {"keys": num_keys, "heads built": len(heads), "CPU s per head": built_s}


class Truth(NamedTuple):
    """Of the queries of one kv head and step: the true answers, all scores and the true output."""

    head: int
    queries: np.ndarray
    ids: list[np.ndarray]
    scores: np.ndarray
    output: np.ndarray


def truths(layer: Layer, query: QueryType, num_checked: int) -> list[Truth]:
    """Of the first steps, for each head that was made."""
    found = []
    for head, made in enumerate(layer.heads):
        keys = layer.graph.indexes[head].keys.to_float32()
        values = layer.graph.values[head].to_float32()
        everything = [np.arange(len(keys))] * GROUP
        for rows in made.queries[:num_checked]:
            ids, _ = reference.search(rows, keys, query)
            scores = reference.scores_of(rows, keys) / np.sqrt(HEAD_SIZE)
            output, _ = reference.attend(rows, keys, values, everything)
            found.append(Truth(head, rows, ids, scores, output))
    return found


def quality(layer: Layer, query: QueryType, truth: list[Truth]) -> Row:
    """Mass of the true answer that was found, error of the output."""
    masses, recalls, errors = [], [], []
    for true in truth:
        index, values = layer.graph.indexes[true.head], layer.graph.values[true.head]
        ids = index.search(true.queries, query).ids
        output = attend(true.queries, index.keys, values, ids).output
        for found, wanted, scores in zip(ids, true.ids, true.scores, strict=True):
            weights = np.exp(scores[wanted] - scores[wanted].max())
            is_found = np.isin(wanted, found)
            masses.append(weights[is_found].sum() / weights.sum())
            recalls.append(is_found.mean())
        norms = np.linalg.norm(true.output, axis=1)
        errors += list(np.linalg.norm(output - true.output, axis=1) / norms)
    return {
        "mass": float(np.mean(masses)),
        "recall": float(np.mean(recalls)),
        "error p50": float(np.median(errors)),
    }


def measure(layer: Layer, query: QueryType, width: int, options: argparse.Namespace) -> Row:
    """Times of one layer, graph at `width` and flat in turn."""
    wide = type(query)(**{**vars(query), "width": width})
    steps = iter(range(10**9))

    def step(contender: SparseLayer, asked: QueryType) -> None:
        queries = layer.queries[next(steps) % len(layer.queries)]
        contender.attend(queries, asked, threads=options.threads)

    times = interleaved(
        {"graph": lambda: step(layer.graph, wide), "flat": lambda: step(layer.flat, query)},
        options.rounds,
        min_sample_s=0.02,
    )
    stats = layer.graph.attend(layer.queries[0], wide, threads=options.threads)[1]
    return {
        "width": width,
        "graph ms": times["graph"].median_ms,
        "flat ms": times["flat"].median_ms,
        "faster": ratio(times["flat"], times["graph"]),
        "distances per kv head": stats.distances / NUM_KV_HEADS,
        "graph MB": stats.bytes / 1e6,
        "spread": times["graph"].spread,
    }


def check(index: CompiledIndex, head: Head) -> None:
    """No times unless the exact scan agrees with the float64 reference."""
    keys = as_elements("keys", index.keys).to_float32()
    found = index.search(head.queries[0], TopK(100)).ids
    true, _ = reference.search(head.queries[0], keys, TopK(100))
    for got, wanted in zip(found, true, strict=True):
        assert len(np.intersect1d(got, wanted)) >= 99


def main() -> None:
    parser = argument_parser(__doc__, rounds=15, threads=2)
    parser.add_argument("--keys", type=int, nargs="+", default=[131_072])
    parser.add_argument("--kind", default="rope", help="of benchmarks.sparse.heads.corpus")
    parser.add_argument("--heads", type=int, default=NUM_KV_HEADS, help="heads of their own")
    parser.add_argument("--train", type=int, default=40_000, help="training queries, at most")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--checked", type=int, default=8, help="steps whose quality is checked")
    options = parser.parse_args()
    if options.smoke:
        options.keys, options.heads, options.steps, options.checked = [2048], 1, 4, 2
        options.rounds = 2
    result = Result.begin(__file__, __doc__, options)
    for num_keys in options.keys:
        layer, row = build(num_keys, options)
        check(layer.flat.indexes[0], layer.heads[0])
        result.add_table(f"{num_keys:,} keys: building a graph", [row])
        for query in (Dipr(beta=RANGE), TopK(100)):
            rows = []
            truth = truths(layer, query, options.checked)
            for width in options.widths[: 2 if options.smoke else None]:
                wide = type(query)(**{**vars(query), "width": width})
                rows.append(
                    {
                        **measure(layer, query, width, options),
                        **quality(layer, wide, truth),
                    }
                )
            what = "mass" if isinstance(query, Dipr) else "recall"
            target = TARGET if isinstance(query, Dipr) else 0.95
            name = f"Dipr(beta={RANGE:.0f})" if isinstance(query, Dipr) else "TopK(100)"
            result.add_table(f"{num_keys:,} keys, {options.kind}: {name}", rows)
            enough = [row["faster"] for row in rows if row[what] >= target]
            bar, aim = BARS.get(num_keys, (None, None))
            result.add_goal(
                Goal(
                    f"{num_keys:,} keys, {options.kind}, {name}, {what} >= {target}: "
                    "graph over our flat scan",
                    max(enough, default=None),
                    bar,
                    aim,
                )
            )
    result.end(options)


if __name__ == "__main__":
    main()

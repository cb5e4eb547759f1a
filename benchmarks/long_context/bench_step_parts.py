# SPDX-License-Identifier: Apache-2.0
"""Where the time of a decode step over a stored context goes: one layer, one core.

Eight kv heads with four query heads each, of the head corpus ("rope"), with memory of their own as
in a context; attention with the default settings of relay_sparse. Times are CPU times of one
thread. Dense is the RELAY kernel over a KV cache with the same tokens. "reading" takes the maximum
of the upper halves of all codes as 64-bit numbers, which is a loop that only reads: no scan of four
bits a dimension takes less. The first pass are scores and weights of all keys by these and means
of values; candidates are what is in range: the rest of their codes, exact scores, values.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.long_context.bench_long_context_decode import Dense
from benchmarks.long_context.corpus_model import Geometry, corpus_heads
from benchmarks.sparse.heads.corpus import Head
from benchmarks.support.formatting import Row
from benchmarks.support.options import argument_parser
from benchmarks.support.result import Result
from benchmarks.support.timing import Timing
from vllm_relay.sparse import Dipr, FlatIndex
from vllm_relay.sparse.index.elements import Elements, from_float32
from vllm_relay.sparse.index.sparse_layer import SparseLayer, value_means

NUM_TOKENS, LAST_TOKENS = 131_072, 64
DEFAULT_ALPHA = 2e-4


class Step:
    """Attention of one token over flat indexes, whose queries differ from step to step."""

    def __init__(self, geometry: Geometry, heads: list[Head]) -> None:
        at = [i % len(heads) for i in range(geometry.num_kv_heads)]
        indexes, values = [], []
        for h in at:  # each builds its own: equal keys must not share memory
            indexes.append(FlatIndex().build(from_float32(heads[h].keys, "bfloat16"), threads=1))
            values.append(from_float32(heads[h].values, "bfloat16"))
        means: list[Elements] = [value_means(each, 1) for each in values]
        self._layer = SparseLayer(indexes, values, value_means=means)
        self._upper = [index.to_arrays()[1]["upper"].view(np.uint64) for index in indexes]
        queries = [np.roll(heads[h].queries, i, 0) for i, h in enumerate(at)]
        self._queries = np.ascontiguousarray(np.stack(queries, 1))
        last = np.stack([heads[h].keys[-LAST_TOKENS:] for h in at])
        self._window_max = np.einsum("shgd,htd->shgt", self._queries, last).max(-1)
        self._number = 0

    def attend(self, alpha: float) -> int:
        """Returns the bytes read."""
        self._number = (self._number + 1) % len(self._queries)
        _, stats = self._layer.attend(
            self._queries[self._number],
            Dipr(alpha=alpha, estimate=True),
            window_max=self._window_max[self._number],
            threads=1,
        )
        return stats.bytes

    def read(self) -> int:
        for each in self._upper:
            each.max()
        return sum(each.nbytes for each in self._upper)


def measure(geometry: Geometry, heads: list[Head], rounds: int, steps: int) -> list[Row]:
    step, dense = Step(geometry, heads), Dense(geometry, heads)
    dense_bytes = 2 * dense.keys.nbytes
    calls: dict[str, Callable[[], Any]] = {
        "dense": dense.step,
        "reading": step.read,
        # nothing but the best is in range
        "first pass": lambda: step.attend(1.0),
        "all": lambda: step.attend(DEFAULT_ALPHA),
    }
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            began_s = time.thread_time()
            for _ in range(steps):
                call()
            samples[name].append((time.thread_time() - began_s) / steps)
    taken_s = {name: Timing(each).median_s for name, each in samples.items()}
    read = {
        name: float(np.mean([calls[name]() for _ in range(steps)]))
        for name in calls
        if name != "dense"
    } | {"dense": float(dense_bytes)}
    taken_s["candidates"] = taken_s["all"] - taken_s["first pass"]
    read["candidates"] = read["all"] - read["first pass"]
    return [
        {
            "part": name,
            "ms": taken_s[name] * 1e3,
            "MB": read[name] / 1e6,
            "GB/s": read[name] / taken_s[name] / 1e9,
            "dense over it": taken_s["dense"] / taken_s[name],
        }
        for name in ("dense", "reading", "first pass", "candidates", "all")
    ]


def main() -> None:
    parser = argument_parser(__doc__, rounds=9)
    parser.add_argument("--heads", type=int, default=2, help="kv heads with own keys (%(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="per round (%(default)s)")
    options: argparse.Namespace = parser.parse_args()
    torch.set_num_threads(1)
    result = Result.begin(__file__, __doc__, options)
    num_tokens = NUM_TOKENS
    if options.smoke:
        num_tokens, options.heads, options.rounds, options.steps = 6000, 1, 1, 1
    geometry = Geometry(num_layers=1)
    heads = corpus_heads(geometry, num_tokens, options.heads)
    rows = measure(geometry, heads, options.rounds, options.steps)
    result.add_table(f"{num_tokens:,} tokens", rows)
    result.end(options)


if __name__ == "__main__":
    main()

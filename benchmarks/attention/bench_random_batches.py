# SPDX-License-Identifier: Apache-2.0
"""Is relay ever slower than CPU_ATTN? Random batches with and without shared prefixes.

The plan of a step is made once for all layers of a model: "with plan" adds a 32nd of the time of
each side's plan to its op. The ten worst batches are measured again, three times as long, to tell
software from disturbance.
"""

from collections.abc import Iterable

import numpy as np

from benchmarks.attention.batches import BLOCK_SIZE_TOKENS, Batch, random_batch
from benchmarks.attention.contenders import (
    Heads,
    KvCaches,
    RelayOp,
    StockOp,
    random_query,
    refuse_wrong_results,
)
from benchmarks.support.formatting import Row
from benchmarks.support.options import argument_parser, run_as_vllm_worker
from benchmarks.support.result import Goal, Result
from benchmarks.support.timing import interleaved, ratio

HEADS = (Heads(32, 8), Heads(32, 32), Heads(28, 4))
NUM_BLOCKS = 640
MAX_KV_TOKENS = 98304
LAYERS = 32
WORST = 10
FEW_BYTES = 1 / 3
MIN_SPEEDUP_OF_FEW_BYTES = 1.3


def measure(caches: KvCaches, batch: Batch, *, threads: int, rounds: int) -> Row:
    query = random_query(caches.heads, batch)
    stock, relay = StockOp(caches, batch, query, threads), RelayOp(caches, batch, query, threads)
    ops = interleaved({"stock": stock.run, "relay": relay.run}, rounds)
    plans = interleaved({"stock": stock.plan, "relay": relay.plan}, rounds, min_sample_s=0)
    with_plan = {name: ops[name].median_s + plans[name].median_s / LAYERS for name in ops}
    stats = relay.step_plan.stats
    return {
        "relay / CPU_ATTN": ratio(ops["relay"], ops["stock"]),
        "with plan": with_plan["relay"] / with_plan["stock"],
        "CPU_ATTN ms": ops["stock"].median_ms,
        "relay ms": ops["relay"].median_ms,
        "plan ms": plans["relay"].median_ms,
        "KV bytes": batch.kv_tokens_unique / batch.kv_tokens,
        "groups read together": stats.groups,
        "heads": str(caches.heads),
        "batch": batch.description,
    }


def draw(seed: int, count: int, num_blocks: int, max_kv_tokens: int) -> Iterable[Batch]:
    for index in range(count):
        yield random_batch(
            np.random.default_rng([seed, index]),
            num_blocks=num_blocks,
            max_kv_tokens=max_kv_tokens,
            block_size=BLOCK_SIZE_TOKENS,
        )


def percentiles(name: str, rows: list[Row], column: str = "relay / CPU_ATTN") -> Row:
    values = np.array([row[column] for row in rows])
    shares = np.percentile(values, [50, 90, 99, 100]).tolist() if len(values) else [None] * 4
    return {
        "batches": name,
        "count": len(rows),
        **dict(zip(("p50", "p90", "p99", "worst"), shares, strict=True)),
        "slower than CPU_ATTN": int((values > 1).sum()),
    }


def main() -> None:
    parser = argument_parser(__doc__, rounds=5)
    parser.add_argument("--batches", type=int, default=500, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--only", type=int, metavar="INDEX", help="one batch, measured 15 times")
    options = parser.parse_args()
    run_as_vllm_worker(options.threads)
    refuse_wrong_results()
    result = Result.begin(__file__, __doc__, options)
    count, num_blocks, max_kv_tokens = options.batches, NUM_BLOCKS, MAX_KV_TOKENS
    if options.smoke:
        count, num_blocks, max_kv_tokens = 6, 160, 4096
    batches = list(draw(options.seed, count, num_blocks, max_kv_tokens))
    indices = range(count) if options.only is None else [options.only]
    rounds = options.rounds if options.only is None else 3 * options.rounds

    rows, again = [], []
    for which, heads in enumerate(HEADS):
        caches = KvCaches(heads, num_blocks)
        here = []
        for index in indices:
            if index % len(HEADS) == which:
                row = measure(caches, batches[index], threads=options.threads, rounds=rounds)
                here.append({"index": index, **row})
        rows += here
        # while the cache of these heads exists: any of these may be among the worst of all
        for row in sorted(here, key=lambda row: -row["relay / CPU_ATTN"])[:WORST]:
            repeated = measure(
                caches, batches[row["index"]], threads=options.threads, rounds=3 * rounds
            )
            again.append({**row, "measured again": repeated["relay / CPU_ATTN"]})
        del caches

    def only(word: str) -> list[Row]:
        return [row for row in rows if word in row["batch"]]

    few = [row for row in rows if row["KV bytes"] <= FEW_BYTES]
    result.add_table(
        "Time of relay's op over CPU_ATTN's",
        [
            percentiles("all", rows),
            percentiles("all, with plan", rows, "with plan"),
            *(percentiles(kind, only(kind)) for kind in ("decode", "speculation", "prompt chunk")),
            percentiles("nothing shared", [row for row in rows if row["KV bytes"] == 1]),
            percentiles("KV bytes a third or less", few),
        ],
    )
    order = ("index", "relay / CPU_ATTN", "measured again")
    worst = sorted(again, key=lambda row: -row["relay / CPU_ATTN"])[:WORST]
    result.add_table(
        "The slowest batches", [{**{key: row[key] for key in order}, **row} for row in worst]
    )
    slow_few = sorted(few, key=lambda row: -row["relay / CPU_ATTN"])[:WORST]
    result.add_table(
        "The slowest of those whose KV bytes sharing cuts to a third or less", slow_few
    )
    summary = {row["batches"]: row for row in result.tables[0]["rows"]}
    result.add_goal(
        Goal(
            f"{count} random batches, time over CPU_ATTN's, 99th percentile",
            summary["all"]["p99"],
            1.05,
            1.0,
            lower_is_better=True,
        )  # fmt: skip
    )
    if few:
        result.add_goal(
            Goal(
                "smallest speed-up where sharing cuts the KV bytes to a third or less",
                1 / summary["KV bytes a third or less"]["worst"],
                MIN_SPEEDUP_OF_FEW_BYTES,
            )  # fmt: skip
        )
    result.end(options)


if __name__ == "__main__":
    main()

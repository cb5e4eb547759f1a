# SPDX-License-Identifier: Apache-2.0
"""What finding out who shares what costs, once per step of a model for all its layers.

CPU_ATTN plans too (its scheduler metadata); it is measured on the same batches.
"""

import numpy as np

from benchmarks.attention.batches import BLOCK_SIZE_TOKENS, Batch, block_tables
from benchmarks.attention.contenders import (
    Heads,
    KvCaches,
    RelayOp,
    StockOp,
    random_query,
    refuse_wrong_results,
)
from benchmarks.support.options import argument_parser
from benchmarks.support.result import Goal, Result
from benchmarks.support.timing import interleaved

REQUESTS, BLOCKS = 256, 1024
HEADS = Heads(32, 8)
BAR_MS = 1.0


def main() -> None:
    options = argument_parser(__doc__, rounds=25).parse_args()
    refuse_wrong_results()
    result = Result.begin(__file__, __doc__, options)
    requests, blocks = (8, 16) if options.smoke else (REQUESTS, BLOCKS)
    caches = KvCaches(HEADS, 1)  # nothing is read from it
    rows = []
    for name, table in block_tables(requests, blocks).items():
        batch = Batch(
            block_table=table,
            query_start_loc=np.arange(requests + 1, dtype=np.int32),
            seq_lens=np.full(requests, blocks * BLOCK_SIZE_TOKENS - 5, np.int32),
            block_size=BLOCK_SIZE_TOKENS,
            description=name,
        )
        query = random_query(HEADS, batch)
        stock = StockOp(caches, batch, query, options.threads)
        relay = RelayOp(caches, batch, query, options.threads)
        times = interleaved({"stock": stock.plan, "relay": relay.plan}, options.rounds)
        stats = relay.step_plan.stats
        rows.append(
            {
                "block tables": name,
                "relay ms": times["relay"].median_ms,
                "spread": times["relay"].spread,
                "slowest ms": max(times["relay"].samples_s) * 1e3,
                "CPU_ATTN ms": times["stock"].median_ms,
                "groups": stats.groups,
                "depth": stats.forest_depth,
            }
        )
        what = f"planning, {requests} requests x {blocks} blocks, {name}, ms"
        result.add_goal(Goal(what, rows[-1]["relay ms"], BAR_MS, lower_is_better=True, unit="ms"))
    result.add_table(f"{requests} requests of {blocks} blocks", rows)
    result.end(options)


if __name__ == "__main__":
    main()

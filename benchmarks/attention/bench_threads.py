# SPDX-License-Identifier: Apache-2.0
"""What more cores gain: relay's op on 1, 2, 4, ... threads.

"machine" is how much faster this machine multiplies on so many cores at once, when nothing is
shared between them: cores of a virtual machine may be hyperthreads of one another.
"""

from benchmarks.attention.batches import shared_prefix
from benchmarks.attention.contenders import (
    Heads,
    KvCaches,
    RelayOp,
    StockOp,
    random_query,
    refuse_wrong_results,
)
from benchmarks.support.machine import available_cores, bf16_peak_gflops, measure_peak
from benchmarks.support.options import argument_parser, run_as_vllm_worker
from benchmarks.support.result import Goal, Result
from benchmarks.support.timing import fraction, interleaved, ratio

REQUESTS, PREFIX_TOKENS, CONTEXT_TOKENS = 32, 8192, 128


def main() -> None:
    parser = argument_parser(__doc__, rounds=9, threads=min(8, len(available_cores())))
    options = parser.parse_args()
    run_as_vllm_worker(options.threads)
    refuse_wrong_results()
    result = Result.begin(__file__, __doc__, options)
    counts = [1]
    while counts[-1] * 2 <= options.threads:
        counts.append(counts[-1] * 2)
    peaks = {count: bf16_peak_gflops(measure_peak(count)) for count in counts}
    prefix_tokens = 256 if options.smoke else PREFIX_TOKENS
    for heads in (Heads(32, 8), Heads(32, 32)):
        batch = shared_prefix(REQUESTS, prefix_tokens, CONTEXT_TOKENS)
        caches = KvCaches(heads, batch.num_blocks)
        query = random_query(heads, batch)
        contenders = {}
        for count in counts:
            stock = StockOp(caches, batch, query, count)
            contenders["stock", count] = stock.run_with_own_threads
            contenders["relay", count] = RelayOp(caches, batch, query, count).run
        times = interleaved(contenders, options.rounds)
        gflop = heads.flops(batch) / 1e9
        rows = []
        for count in counts:
            relay, stock = times["relay", count], times["stock", count]
            rows.append(
                {
                    "threads": count,
                    "relay ms": relay.median_ms,
                    "spread": relay.spread,
                    "relay over 1 thread": ratio(times["relay", 1], relay),
                    "CPU_ATTN over 1 thread": ratio(times["stock", 1], stock),
                    "machine": fraction(peaks[count] or 0.0, peaks[1]),
                    "speed-up over CPU_ATTN": ratio(stock, relay),
                    "of peak": fraction(gflop / relay.median_s, peaks[count]),
                }
            )
        result.add_table(f"{heads} heads, {batch.description}", rows)
        if len(counts) > 1 and heads.num_kv_heads == 8:
            result.add_goal(
                Goal(
                    "2 threads over 1, batch 32, prefix 8192",
                    rows[1]["relay over 1 thread"],
                    1.7,
                    1.9,
                )  # fmt: skip
            )
    result.end(options)


if __name__ == "__main__":
    main()

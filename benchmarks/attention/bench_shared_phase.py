# SPDX-License-Identifier: Apache-2.0
"""How fast the shared part alone is computed: requests that share all of their tokens.

The rows of one kv head are requests x query heads per kv head. With AVX-512 BF16 the weights of the
values are kept as two bfloat16 numbers each, so that of three multiplications two count: such a
kernel cannot get beyond 2/3 of the peak ("of ceiling").
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
from benchmarks.support.machine import attention_ceiling_gflops, bf16_peak_gflops
from benchmarks.support.options import argument_parser, run_as_vllm_worker
from benchmarks.support.result import Goal, Result
from benchmarks.support.timing import fraction, interleaved
from vllm_relay.attention_backends.cpu import kernels as cpu

HEADS = Heads(32, 8)
PREFIX_TOKENS = 8192
GOALS = {32: (550, 650), 64: (800, 950), 128: (1000, 1200), 256: (1100, 1400)}


def main() -> None:
    parser = argument_parser(__doc__, rounds=9)
    parser.add_argument("--prefix", type=int, default=PREFIX_TOKENS, help="tokens (%(default)s)")
    options = parser.parse_args()
    run_as_vllm_worker(options.threads)
    refuse_wrong_results()
    result = Result.begin(__file__, __doc__, options)
    peak = bf16_peak_gflops(result.peak)
    kernel = cpu.kernel_for(HEADS.dtype)
    ceiling = attention_ceiling_gflops(result.peak, kernel)
    prefix_tokens = 512 if options.smoke else options.prefix
    caches = KvCaches(HEADS, prefix_tokens // 128 + 2)
    rows = []
    for rows_per_kv_head in (4, 8, 16, 32, 64, 128, 256, 512):
        requests = rows_per_kv_head // HEADS.group_size
        batch = shared_prefix(requests, prefix_tokens, 0)
        query = random_query(HEADS, batch)
        stock = StockOp(caches, batch, query, options.threads)
        relay = RelayOp(caches, batch, query, options.threads)
        times = interleaved({"stock": stock.run, "relay": relay.run}, options.rounds)
        gflop = HEADS.flops(batch) / 1e9
        gflops = gflop / times["relay"].median_s
        rows.append(
            {
                "rows per kv head": rows_per_kv_head,
                "requests": requests,
                "relay ms": times["relay"].median_ms,
                "spread": times["relay"].spread,
                "relay GFLOP/s": gflops,
                "of peak": fraction(gflops, peak),
                "of ceiling": fraction(gflops, ceiling),
                "CPU_ATTN GFLOP/s": gflop / times["stock"].median_s,
            }
        )
        if rows_per_kv_head in GOALS:
            bar, aim = GOALS[rows_per_kv_head]
            what = f"shared phase, {rows_per_kv_head} rows per kv head, GFLOP/s of one core"
            result.add_goal(Goal(what, gflops, bar, aim, unit="GFLOP/s"))
    result.add_table(f"{HEADS} heads, {prefix_tokens} tokens, all shared; kernel {kernel}", rows)
    result.end(options)


if __name__ == "__main__":
    main()

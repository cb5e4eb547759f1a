# SPDX-License-Identifier: Apache-2.0
"""One layer's attention of decoding requests that share a prefix: relay's op against CPU_ATTN.

The shapes are those of the models people serve, of Figure 5 of the RelayAttention paper (batch 32,
context 128, prefix 64 to 16384) and of the models of its Table 4, and a sweep over batch sizes.
"theory" is equation 10 of the paper, which counts elements moved to and from memory:
(s + c + 2) / (s / b + c + 7) for batch b, prefix s, context c.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.attention.batches import Batch, shared_prefix
from benchmarks.attention.contenders import (
    Heads,
    KvCaches,
    RelayOp,
    StockOp,
    kv_bytes,
    random_query,
    refuse_wrong_results,
    without_unserved,
)
from benchmarks.support.formatting import Row
from benchmarks.support.machine import attention_ceiling_gflops, bf16_peak_gflops
from benchmarks.support.options import argument_parser, run_as_vllm_worker
from benchmarks.support.result import Goal, Result
from benchmarks.support.timing import fraction, interleaved, ratio
from vllm_relay.attention_backends.cpu import kernels as cpu

LLAMA_2_7B, LLAMA_3_8B, QWEN_2_7B = Heads(32, 32), Heads(32, 8), Heads(28, 4)
CONTEXT_TOKENS = 128


def goals(amx: tuple[float, float], avx512_bf16: float) -> dict[str, tuple[float, float | None]]:
    """CPU_ATTN uses AMX where there is AMX; kernels without bfloat16 are not slower than it."""
    return {
        "amx_bf16": amx,
        "avx512_bf16": (avx512_bf16, None),
        "avx512": (1, None),
        "avx2": (1, None),
    }


@dataclass(frozen=True)
class Case:
    heads: Heads
    requests: int
    prefix_tokens: int
    context_tokens: int = CONTEXT_TOKENS
    model: str = ""
    goals: Mapping[str, tuple[float, float | None]] = field(default_factory=dict)
    """The speed-ups wanted of a kernel, and aimed at."""
    deviation: float = 1.0
    """Of scores. Where they lie far apart, references are raised (docs/kernels.md, section 4)."""


MAIN = [
    Case(LLAMA_3_8B, 32, 2048, model="Llama-3-8B", goals=goals(amx=(2.2, 3), avx512_bf16=2.4)),
    Case(LLAMA_3_8B, 32, 8192, model="Llama-3-8B", goals=goals(amx=(7, 10), avx512_bf16=2.5)),
    Case(LLAMA_2_7B, 32, 2048, model="Llama-2-7B", goals=goals(amx=(3, 4.5), avx512_bf16=3.8)),
    Case(LLAMA_2_7B, 32, 8192, model="Llama-2-7B", goals=goals(amx=(10, 15), avx512_bf16=5)),
    Case(QWEN_2_7B, 32, 4096, model="Qwen2-7B", goals=goals(amx=(4, 6), avx512_bf16=2.2)),
    Case(LLAMA_3_8B, 32, 0, 2048, model="Llama-3-8B, nothing shared"),
    Case(LLAMA_2_7B, 32, 0, 1024, model="Llama-2-7B, nothing shared"),
    Case(LLAMA_3_8B, 1, 0, 8192, model="Llama-3-8B, one request"),
]
FIGURE_5 = [Case(LLAMA_2_7B, 32, 64 << i) for i in range(9)]
TABLE_4 = [
    Case(heads, 32, prefix_tokens, model=model)
    for prefix_tokens in (512, 1024)
    for model, heads in (
        ("Llama-2-13B", Heads(40, 40)),
        ("Llama-30B", Heads(52, 52)),
        ("Phi-2", Heads(32, 32, 80)),
        ("Mistral-7B", Heads(32, 8)),
    )
]
BATCH_SIZES = [
    Case(LLAMA_2_7B, requests, prefix_tokens)
    for prefix_tokens in (2048, 8192)
    for requests in (1, 2, 4, 8, 16, 32, 64)
]
LLAMA_3_8B_FP8 = Heads(32, 8, kv_cache_dtype="fp8")
FP8 = [
    Case(heads, *sizes)
    for sizes in ((32, 2048), (32, 8192), (32, 0, 2048), (1, 0, 8192))
    for heads in (LLAMA_3_8B, LLAMA_3_8B_FP8)
]
PEAKED = [
    Case(LLAMA_3_8B, 32, 2048, model=f"scores of deviation {deviation}", deviation=deviation)
    for deviation in (1, 10, 20, 30, 40, 60, 100)
]
SECTIONS = {
    "main": ("Models", MAIN),
    "figure5": ("Prefix length (Figure 5 of the paper)", FIGURE_5),
    "table4": ("Models and prefixes of Table 4 of the paper", TABLE_4),
    "batch": ("Batch size", BATCH_SIZES),
    "fp8": ("KV caches in bfloat16 and in fp8", FP8),
    "peaked": ("Scores further apart", PEAKED),
}
SMOKE = [
    Case(LLAMA_3_8B, 4, 256, 40, model="Llama-3-8B"),
    Case(QWEN_2_7B, 3, 0, 200, model="Qwen2-7B"),
    Case(LLAMA_3_8B_FP8, 4, 256, 40, model="Llama-3-8B"),
]


def theoretical_speedup(case: Case) -> float:
    s, c, b = case.prefix_tokens, case.context_tokens, case.requests
    return (s + c + 2) / (s / b + c + 7)


def least_s(heads: Heads, batch: Batch, peak: dict) -> float | None:
    """What the cores that were calibrated need if they only multiply or only read memory."""
    ceiling = attention_ceiling_gflops(peak, cpu.kernel_for(heads.dtype))
    if ceiling is None:
        return None
    read_bytes = kv_bytes(heads, batch, shared_once=True)
    return max(
        heads.flops(batch) / (ceiling * 1e9), read_bytes / (peak["read_256_mib_gb_per_s"] * 1e9)
    )


def measure(case: Case, *, threads: int, rounds: int, peak: dict) -> Row:
    heads = case.heads
    batch = shared_prefix(case.requests, case.prefix_tokens, case.context_tokens)
    caches = KvCaches(heads, batch.num_blocks)
    query = random_query(heads, batch) * case.deviation
    stock = StockOp(caches, batch, query, threads)
    relay = RelayOp(caches, batch, query, threads)
    apart = RelayOp(caches, batch, query, threads, forest=None)
    times = interleaved({"stock": stock.run, "relay": relay.run, "apart": apart.run}, rounds)
    gflop = heads.flops(batch) / 1e9
    relay_gflops = gflop / times["relay"].median_s
    least = least_s(heads, batch, peak)
    return {
        **({"model": case.model} if case.model else {}),
        "heads": str(heads),
        "batch": case.requests,
        "prefix": case.prefix_tokens,
        "context": case.context_tokens,
        "CPU_ATTN ms": times["stock"].median_ms,
        "relay ms": times["relay"].median_ms,
        "spread": max(times["stock"].spread, times["relay"].spread),
        "speed-up": ratio(times["stock"], times["relay"]),
        "theory": theoretical_speedup(case),
        "machine allows": least and times["stock"].median_s / least,
        "without sharing": ratio(times["stock"], times["apart"]),
        "KV bytes": kv_bytes(heads, batch, shared_once=False)
        / kv_bytes(heads, batch, shared_once=True),
        "CPU_ATTN GFLOP/s": gflop / times["stock"].median_s,
        "relay GFLOP/s": relay_gflops,
        "of peak": fraction(relay_gflops, bf16_peak_gflops(peak)),
    }


def main(file: str = __file__, description: str = __doc__) -> None:
    parser = argument_parser(description, rounds=7)
    parser.add_argument(
        "--section", choices=[*SECTIONS, "all"], default="all", help="(%(default)s)"
    )
    options = parser.parse_args()
    run_as_vllm_worker(options.threads)
    refuse_wrong_results()
    result = Result.begin(file, description, options)
    chosen = SECTIONS.values() if options.section == "all" else [SECTIONS[options.section]]
    for title, cases in [("Smoke", SMOKE)] if options.smoke else chosen:
        rows = []
        for case in (case for case in cases if without_unserved([case.heads])):
            row = measure(case, threads=options.threads, rounds=options.rounds, peak=result.peak)
            rows.append(row)
            if (kernel := cpu.kernel_for(case.heads.dtype)) in case.goals:
                bar, aim = case.goals[kernel]
                result.add_goal(
                    Goal(
                        f"op, {kernel}, {case.heads} heads, batch {case.requests}, prefix "
                        f"{case.prefix_tokens}, over CPU_ATTN",
                        row["speed-up"],
                        bar,
                        aim,
                    )
                )
        result.add_table(title, rows)
    result.end(options)


if __name__ == "__main__":
    main()

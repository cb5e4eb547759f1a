# SPDX-License-Identifier: Apache-2.0
"""How far results are from those in float64, beside CPU_ATTN's on the same input.

Keys are normal numbers times 1, 4 and 20: from attention spread over all tokens to attention to a
single one. Errors are differences from the float64 result for the same bfloat16 input; rounding the
exact result to bfloat16 ("rounding") is the least there can be. The second table has the errors of
KV caches in fp8, relative to the outputs: differences from the float64 result for keys and values
that were not rounded to fp8.
"""

from argparse import Namespace
from dataclasses import replace

import torch

from benchmarks.attention.batches import Batch, shared_prefix
from benchmarks.attention.contenders import (
    Heads,
    KvCaches,
    RelayOp,
    StockOp,
    random_query,
    reference_output,
    refuse_wrong_results,
    without_unserved,
)
from benchmarks.support.formatting import Row
from benchmarks.support.options import argument_parser
from benchmarks.support.result import Goal, Result
from vllm_relay.attention_backends.cpu.kernels import usable_kernels

KEY_FACTORS = (1, 4, 20)
SHAPES = ((Heads(32, 8), 8, 2048, 77), (Heads(28, 4), 8, 1024, 200), (Heads(8, 8), 16, 512, 33))
RMS_BAR, MAX_BAR = 1.1, 1.6


def fp8_error(heads: Heads, batch: Batch, factor: float, options: Namespace) -> Row:
    errors: dict[str, list[torch.Tensor]] = {"relay": [], "stock": [], "exact": []}
    in_fp8 = replace(heads, kv_cache_dtype="fp8")
    for seed in range(options.seeds):
        query = random_query(heads, batch, seed=1000 + seed)
        caches, narrow = (
            KvCaches(each, batch.num_blocks, key_factor=factor, seed=seed)
            for each in (heads, in_fp8)
        )
        exact = reference_output(caches, batch, query)
        errors["exact"].append(exact.flatten())
        contenders = {
            "relay": RelayOp(narrow, batch, query, options.threads),
            "stock": StockOp(narrow, batch, query, options.threads),
        }
        for name, contender in contenders.items():
            contender.run()
            errors[name].append((contender.output.double() - exact).flatten())
    rms = {name: float(torch.cat(each).square().mean().sqrt()) for name, each in errors.items()}
    return {
        "heads": str(in_fp8),
        "batch": batch.description,
        "keys x": factor,
        "relay rms": rms["relay"] / rms["exact"],
        "CPU_ATTN rms": rms["stock"] / rms["exact"],
        "rms ratio": rms["relay"] / rms["stock"],
    }


def main() -> None:
    parser = argument_parser(__doc__, rounds=1)
    parser.add_argument("--seeds", type=int, default=3, help="(%(default)s)")
    options = parser.parse_args()
    refuse_wrong_results()
    result = Result.begin(__file__, __doc__, options)
    shapes = [(Heads(8, 2), 3, 128, 20)] if options.smoke else SHAPES
    rows, fp8_rows = [], []
    for heads, requests, prefix_tokens, context_tokens in shapes:
        batch = shared_prefix(requests, prefix_tokens, context_tokens)
        for factor in KEY_FACTORS:
            errors: dict[str, list[torch.Tensor]] = {"relay": [], "stock": [], "rounding": []}
            for seed in range(options.seeds):
                caches = KvCaches(heads, batch.num_blocks, key_factor=factor, seed=seed)
                query = random_query(heads, batch, seed=1000 + seed)
                exact = reference_output(caches, batch, query)
                relay = RelayOp(caches, batch, query, options.threads)
                stock = StockOp(caches, batch, query, options.threads)
                relay.run()
                stock.run()
                outputs = {
                    "relay": relay.output,
                    "stock": stock.output,
                    "rounding": exact.to(heads.dtype),
                }
                for name, output in outputs.items():
                    errors[name].append((output.double() - exact).flatten())
            rms = {name: float(torch.cat(e).square().mean().sqrt()) for name, e in errors.items()}
            largest = {name: float(torch.cat(e).abs().max()) for name, e in errors.items()}
            rows.append(
                {
                    "heads": str(heads),
                    "batch": batch.description,
                    "keys x": factor,
                    "relay rms": rms["relay"],
                    "CPU_ATTN rms": rms["stock"],
                    "rounding rms": rms["rounding"],
                    "rms ratio": rms["relay"] / rms["stock"],
                    "relay max": largest["relay"],
                    "CPU_ATTN max": largest["stock"],
                    "max ratio": largest["relay"] / largest["stock"],
                }
            )
            if without_unserved([replace(heads, kv_cache_dtype="fp8")]):
                fp8_rows.append(fp8_error(heads, batch, factor, options))
    result.add_table("Error of bfloat16 attention", rows)
    if fp8_rows:
        result.add_table("Error of attention over fp8 KV caches", fp8_rows)
    kernel = usable_kernels(torch.bfloat16)[0]
    for factor in KEY_FACTORS:
        those = [row for row in rows if row["keys x"] == factor]
        for column, bar in (("rms ratio", RMS_BAR), ("max ratio", MAX_BAR)):
            worst = max(row[column] for row in those)
            what = f"error, {kernel}, keys x {factor}, {column} to CPU_ATTN"
            result.add_goal(Goal(what, worst, bar, lower_is_better=True))
    result.end(options)


if __name__ == "__main__":
    main()

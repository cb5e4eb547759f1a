# SPDX-License-Identifier: Apache-2.0
"""How often a weight in one bfloat16 number is enough, and what that costs.

Kernels that multiply in bfloat16 keep a weight as two numbers, and leave the lower ones of a row's
tile of 32 tokens out where they do not show; where no row of those that are multiplied together
needs them, the second product with V is skipped. Counted here in a model of the kernel, on the
heads of SmolLM2 (every third layer; texts of this project) and on random ones. "of all products"
counts those with K too. "rms" is the error against float64, over that of two numbers everywhere.
The rule of the kernels compares a tile's largest weight with the largest of 16 partial sums of its
row; beside it stands the plain one, which compares with the whole sum. Counts, not times.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.sparse.heads.recorded import load_model, record_attention
from benchmarks.sparse.real_heads.texts import passages
from benchmarks.support.formatting import Row
from benchmarks.support.options import argument_parser
from benchmarks.support.result import Goal, Result
from vllm_relay.attention_backends.cpu.work_items import SEGMENT_TOKENS
from vllm_relay.demo.smollm2.download import smollm2_folder

TILE_TOKENS, PARTIAL_SUMS = 32, 16
KERNELS, WHOLE_SUM = "largest partial sum, 2^-7", "whole sum, 2^-8"
EVERY_LAYERS = 3
RMS_BAR = 1.1


@dataclass(frozen=True)
class Rows:
    """Rows that attend to the same tokens, bfloat16 numbers in float32.

    Attributes:
        queries: [rows, d], those that are multiplied together behind each other.
        keys, values: [tokens, d]
        together: rows that are multiplied together.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    scale: float
    together: int


@dataclass
class Found:
    """What several `Rows` have shown."""

    skipped: int = 0
    products: int = 0
    squares: float = 0.0
    squares_of_two: float = 0.0

    def row(self, what: str, rule: str) -> Row:
        return {
            "rows": what,
            "compared with": rule,
            "second products skipped": self.skipped / self.products,
            "of all products": self.skipped / self.products / 3,
            "rms": (self.squares / self.squares_of_two) ** 0.5,
        }


def dropped(weights: torch.Tensor, rule: str) -> torch.Tensor:
    """bool [rows, tiles]: whose lower numbers are left out, of the whole tiles of a segment.

    Args:
        weights: [rows, tokens]
    """
    tiles = weights[:, : weights.shape[1] // TILE_TOKENS * TILE_TOKENS].unflatten(
        1, (-1, TILE_TOKENS)
    )
    if rule == WHOLE_SUM:
        return tiles.amax(2) < 2.0**-8 * tiles.sum(2).cumsum(1)
    partial = tiles.unflatten(2, (-1, PARTIAL_SUMS)).sum(2).cumsum(1).amax(2)
    return tiles.amax(2) <= 2.0**-7 * partial


def add(rows: Rows, found: dict[str, Found]) -> None:
    """Counts, by rule; the denominator sums the weights as they are, segment by segment."""
    scores = (rows.queries.double() @ rows.keys.double().T) * rows.scale
    exact = scores.softmax(1) @ rows.values.double()
    sums = dict.fromkeys(["two", *found], 0.0)
    shift = scores.amax(1, keepdim=True)
    total = (scores - shift).exp().sum(1, keepdim=True)
    for begin in range(0, scores.shape[1], SEGMENT_TOKENS):
        segment = slice(begin, begin + SEGMENT_TOKENS)
        reference = (
            scores[:, begin : begin + TILE_TOKENS].amax(1, keepdim=True) / np.log(2)
        ).ceil()
        weights = (scores[:, segment] / np.log(2) - reference).exp2().float()
        factor = (reference * np.log(2) - shift).exp()
        high = weights.bfloat16().float()
        low = (weights - high).bfloat16().float()
        for rule in sums:
            kept = low
            if rule != "two":
                drops = dropped(weights, rule)
                kept = low.clone()
                width = drops.shape[1] * TILE_TOKENS
                kept[:, :width] *= ~drops.repeat_interleave(TILE_TOKENS, 1)
                skips = drops.unflatten(0, (-1, rows.together)).all(1)
                found[rule].skipped += int(skips.sum())
                found[rule].products += skips.numel()
            sums[rule] = sums[rule] + factor * (
                (high + kept).double() @ rows.values[segment].double()
            )
    squares = {
        rule: float(((each / total).bfloat16().double() - exact).square().sum())
        for rule, each in sums.items()
    }
    for rule, each in found.items():
        each.squares += squares[rule]
        each.squares_of_two += squares["two"]


def random_rows(tokens: int, factor: float) -> Iterator[Rows]:
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        queries, keys, values = (
            torch.randn(size, 128, generator=generator) for size in (48, tokens, tokens)
        )
        keys = keys * factor
        rounded = (each.bfloat16().float() for each in (queries, keys, values))
        yield Rows(*rounded, scale=128**-0.5, together=6)


def real_rows(model: Any, token_ids: list[int]) -> Iterator[tuple[str, Rows]]:
    """Of decodes behind all but the last tokens, and from the middle of a prompt."""
    tokens = len(token_ids)
    for layer in record_attention(model, token_ids)[::EVERY_LAYERS]:
        queries, keys, values = (
            torch.from_numpy(each).bfloat16().float()
            for each in (layer.queries, layer.keys, layer.values)
        )
        group = layer.group_size
        for head in range(keys.shape[1]):
            asking, key, value = (
                queries[:, head * group : (head + 1) * group], keys[:, head], values[:, head],
            )  # fmt: skip
            last = asking[tokens - 48 :: 6].flatten(0, 1)
            middle = asking[tokens // 2 : tokens // 2 + 8].flatten(0, 1)
            context, half = slice(tokens - 64), slice(tokens // 2)
            for what, rows, seen, together in (
                ("decode, one request", last, context, group),
                ("decode, two requests", last, context, 2 * group),
                ("middle of a prompt", middle, half, 2 * group),
            ):
                yield what, Rows(rows, key[seen], value[seen], layer.scale, together)


def measure(options: Namespace, result: Result) -> None:
    from transformers import AutoTokenizer

    counted: dict[str, dict[str, Found]] = {}

    def count(what: str, rows: Rows) -> None:
        found = counted.setdefault(what, {KERNELS: Found(), WHOLE_SUM: Found()})
        add(rows, found)

    for factor in (0.25, 1.0, 4.0, 20.0):
        for tokens in options.tokens:
            for rows in random_rows(tokens, factor):
                count(f"random, keys x {factor:g}, {tokens:,} tokens", rows)
    for kind in options.kinds:
        model, tokenizer = (
            load_model(smollm2_folder()),
            AutoTokenizer.from_pretrained(smollm2_folder()),
        )
        for tokens in options.tokens:
            [passage] = passages(tokenizer, kind, "reporting", [tokens])
            for what, rows in real_rows(model, passage.token_ids):
                count(f"{kind}, {what}, {tokens:,} tokens", rows)
    table = [
        found.row(what, rule) for what, rules in counted.items() for rule, found in rules.items()
    ]
    result.add_table("Weights in one bfloat16 number", table)
    worst = max(row["rms"] for row in table if row["compared with"] == KERNELS)
    goal = Goal("weights in one number, rms over two", worst, RMS_BAR, lower_is_better=True)
    result.add_goal(goal)


def main() -> None:
    parser = argument_parser(__doc__, rounds=1)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192], help="(%(default)s)")
    parser.add_argument("--kinds", nargs="*", default=["English", "code"], help="(%(default)s)")
    options = parser.parse_args()
    if options.smoke:
        options.tokens, options.kinds = [512], []
    torch.set_num_threads(options.threads)
    result = Result.begin(__file__, __doc__, options)
    measure(options, result)
    result.end(options)


if __name__ == "__main__":
    main()

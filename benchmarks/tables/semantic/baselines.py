# SPDX-License-Identifier: Apache-2.0
"""What is done without the operators."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from vllm_relay.tables.jobs.prompts.format import PromptFormat, PromptTemplate
from vllm_relay.tables.question import Question

Comparison = Callable[[int, int], bool]
"""Whether the first of two rows comes before the second."""


def quickselect(rows: list[int], k: int, is_before: Comparison, seed: int) -> list[int]:
    """The first k rows in their order: quickselect, then quicksort of what it found, one comparison
    after the other (Hoare, "Algorithm 65: Find", 1961)."""
    rng = np.random.default_rng(seed)

    def divided(part: list[int]) -> tuple[list[int], int, list[int]]:
        pivot = part[int(rng.integers(len(part)))]
        before: list[int] = []
        after: list[int] = []
        for row in part:
            if row != pivot:
                (before if is_before(row, pivot) else after).append(row)
        return before, pivot, after

    def selected(part: list[int], count: int) -> list[int]:
        if count <= 0 or len(part) <= count:
            return part[: max(count, 0)]
        before, pivot, after = divided(part)
        if len(before) >= count:
            return selected(before, count)
        return [*before, pivot, *selected(after, count - len(before) - 1)]

    def in_order(part: list[int]) -> list[int]:
        if len(part) < 2:
            return part
        before, pivot, after = divided(part)
        return [*in_order(before), pivot, *in_order(after)]

    return in_order(selected(rows, k))


def prompts_of(question: Question, tokenizer: Any, fields: list[dict[str, str]]) -> list[list[int]]:
    """Tokens of prompts, in this order.

    Args:
        fields: JSON by name, of each prompt.
    """
    form = PromptFormat(question, tokenizer, PromptTemplate())
    messages = [
        form.message(form.template.render_field(*each) for each in row.items()) for row in fields
    ]
    return form.token_ids(messages)


def refined(records: list[str], amounts: list[int]) -> list[dict[str, str]]:
    """Prompts that add a record to the answer so far, one after the other."""
    found, total = [], 0
    for record, amount in zip(records, amounts, strict=True):
        found.append({"records": f"[{json.dumps(total)},{record}]"})
        total += amount
    return found


def similar_pairs(shown: list[str], similarity: float) -> set[tuple[int, int]]:
    """Of all pairs of texts those with so large a share of pieces of five characters in common."""
    pieces = [{text[i : i + 5] for i in range(len(text) - 4)} for text in shown]
    numbers = {piece: i for i, piece in enumerate(sorted(set().union(*pieces)))}
    has_piece = np.zeros((len(shown), len(numbers)), np.float32)
    for row, own in enumerate(pieces):
        has_piece[row, [numbers[piece] for piece in own]] = 1
    common = has_piece @ has_piece.T
    counts = has_piece.sum(axis=1)
    either = counts[:, None] + counts - common
    rows, others = np.nonzero(np.tril(common >= similarity * either, -1))
    return set(zip(rows.tolist(), others.tolist(), strict=True))

# SPDX-License-Identifier: Apache-2.0
"""Prompts of any length with one right answer, for the recall model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_relay.demo.tokenizer import BOS_TOKEN_ID, EOS_TOKEN_ID, vocabulary


@dataclass(frozen=True)
class Haystack:
    """A prompt whose last two tokens occurred before, and the tokens that followed them there."""

    prompt_token_ids: list[int]
    answer_token_ids: list[int]


def make_haystack(
    num_tokens: int, *, num_answer_tokens: int = 2, vocab_size: int | None = None, seed: int = 0
) -> Haystack:
    """Random tokens in which no two adjacent ones occur twice, closed by one such pair asked again.

    Args:
        num_tokens: length of the prompt, beginning-of-sequence token and the closing pair included.
        num_answer_tokens: how many tokens after the pair are the answer.
        vocab_size: tokens are drawn below this; the vocabulary of `build_recall_model` if None.
        seed: the same seed gives the same haystack.

    Raises:
        ValueError: the prompt is too short for the answer, or too long to have no pair twice.
    """
    vocab_size = len(vocabulary()) if vocab_size is None else vocab_size
    num_searched_tokens = num_tokens - 2
    if num_searched_tokens < 3 + num_answer_tokens:
        raise ValueError(
            f"num_tokens is {num_tokens}, expected at least {5 + num_answer_tokens} "
            f"for an answer of {num_answer_tokens} tokens"
        )
    first_token_id = EOS_TOKEN_ID + 1
    num_pairs = max(0, vocab_size - first_token_id) ** 2
    if num_searched_tokens > num_pairs // 2:
        raise ValueError(
            f"num_tokens is {num_tokens}, expected at most {num_pairs // 2 + 2} "
            f"with a vocabulary of {vocab_size} tokens"
        )
    rng = np.random.default_rng(seed)
    tokens = [BOS_TOKEN_ID]
    seen: set[tuple[int, int]] = set()
    while len(tokens) < num_searched_tokens:
        pair = tokens[-1], int(rng.integers(first_token_id, vocab_size))
        if pair not in seen:
            seen.add(pair)
            tokens.append(pair[1])
    begin = int(rng.integers(1, num_searched_tokens - 1 - num_answer_tokens))
    answer = tokens[begin + 2 : begin + 2 + num_answer_tokens]
    return Haystack(tokens + tokens[begin : begin + 2], answer)

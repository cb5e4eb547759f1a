# SPDX-License-Identifier: Apache-2.0
"""What a model that speaks English was asked, and what both engines answered."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from vllm_relay.demo.requests import Request

_SHOWN_ANSWERS = 3


def answers_table(
    model: str,
    requests: Sequence[Request],
    stock: Sequence[Sequence[int]],
    relay: Sequence[Sequence[int]],
) -> Table:
    """The first questions and both answers, for the terminal.

    Args:
        model: the folder or hub id that the tokenizer is of.
        requests: those that were answered, in the order of the answers.
        stock, relay: token ids of the answers.
    """
    tokenizer = AutoTokenizer.from_pretrained(model)
    table = Table(title="For example", show_lines=True)
    for title in ("asked", "stock vLLM", "with relay"):
        table.add_column(title, ratio=1, overflow="fold")
    for request, *answers in zip(requests[:_SHOWN_ANSWERS], stock, relay, strict=False):
        texts = [answer_text(tokenizer, answer) for answer in answers]
        table.add_row(*map(escape, [request.question, *texts]))
    return table


def answer_text(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """Up to where the model ended it, in one line; "..." follows where it did not.

    Engines are told to go on behind the end, so that all answers are of one length.
    """
    tokens = list(token_ids)
    ended = tokenizer.eos_token_id in tokens
    if ended:
        tokens = tokens[: tokens.index(tokenizer.eos_token_id)]
    text = " ".join(str(tokenizer.decode(tokens, skip_special_tokens=True)).split())
    return text if ended else f"{text} ..."

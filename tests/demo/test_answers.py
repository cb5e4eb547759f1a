# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

from rich.console import Console

from vllm_relay.demo.answers import answer_text, answers_table
from vllm_relay.demo.recall_model import build_recall_model
from vllm_relay.demo.requests import Request
from vllm_relay.demo.tokenizer import EOS_TOKEN_ID, build_tokenizer


def test_an_answer_ends_where_the_model_ended_it() -> None:
    tokenizer = build_tokenizer(512)
    words = tokenizer.encode("amber falcon", add_special_tokens=False)
    assert answer_text(tokenizer, [*words, EOS_TOKEN_ID, *words]) == "amber falcon"
    assert answer_text(tokenizer, words) == "amber falcon ..."
    assert answer_text(tokenizer, [EOS_TOKEN_ID, *words]) == ""


def test_three_questions_are_shown_with_both_answers(tmp_path: Path) -> None:
    folder = build_recall_model(tmp_path, max_position_embeddings=64)
    tokenizer = build_tokenizer(64)
    stock = [tokenizer.encode(text, add_special_tokens=False) for text in ["amber falcon"] * 4]
    relay = [tokenizer.encode(text, add_special_tokens=False) for text in ["silver harp"] * 4]
    requests = [Request([1], question=f"[red]Question {i}?") for i in range(4)]
    console = Console(width=120)
    with console.capture() as capture:
        console.print(answers_table(str(folder), requests, stock, relay))
    printed = capture.get()
    assert printed.count("amber falcon ...") == printed.count("silver harp ...") == 3
    assert "[red]Question 2?" in printed and "Question 3?" not in printed

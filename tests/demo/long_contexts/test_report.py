# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from typing import Any

from rich.console import Console

from vllm_relay.demo.long_contexts.engine import LongAnswer
from vllm_relay.demo.long_contexts.report import LongComparison, answers_table, costs_table
from vllm_relay.demo.requests import Request

# the answers begin at the tokens 4 and 2
REQUESTS = [Request([1, 9, 5, 6, 7, 8, 5, 6], [7, 8]), Request([3, 4, 5, 6, 3, 4], [5, 6])]


def answer(token_ids: list[int], **changes: Any) -> LongAnswer:
    values = {
        "prompt_s": 2.0,
        "tokens_s": [0.5, 0.5],
        "prompt_kv_blocks": 40,
        "decode_kv_blocks": 40,
    }
    return LongAnswer(token_ids, **{**values, **changes}, kv_block_bytes=2**20)


def compared(first: list[int], second: list[int]) -> LongComparison:
    """The dense answers are right."""
    return LongComparison(
        REQUESTS,
        [answer([7, 8]), answer([5, 6], prompt_s=0.25)],
        [
            answer(first, prompt_s=3.0, prompt_kv_blocks=30, decode_kv_blocks=4),
            answer(second, prompt_s=1.0, tokens_s=[4.0, 0.25, 1.5], decode_kv_blocks=5),
        ],
    )


def printed(comparison: LongComparison) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(answers_table(comparison, str))
        console.print(costs_table(comparison))
    return capture.get()


def test_right_answers_are_a_success() -> None:
    comparison = compared([7, 8], [5, 6])
    assert comparison.problems() == []
    assert comparison.identical_outputs == 2
    assert comparison.dense.answers_right == comparison.sparse.answers_right == 2
    assert "wrong" not in printed(comparison)
    assert json.loads(json.dumps(comparison.as_dict()))["passed"]


def test_a_wrong_answer_is_a_problem_and_shown() -> None:
    comparison = compared([7, 8], [5, 0])
    assert comparison.problems() == ["relay_sparse answered 1 of 2 questions wrong"]
    assert comparison.identical_outputs == 1
    assert "wrong: [5, 0]" in printed(comparison)


def test_the_first_question_reads_the_document() -> None:
    dense, sparse = compared([7, 8], [5, 6]).dense, compared([7, 8], [5, 6]).sparse
    assert (dense.document_s, sparse.document_s) == (2.0, 3.0)
    assert (dense.first_token_s, sparse.first_token_s) == (0.25, 1.0)
    assert (dense.document_kv_bytes, sparse.document_kv_bytes) == (40 * 2**20, 30 * 2**20)


def test_memory_is_the_most_and_time_the_median() -> None:
    sparse = compared([7, 8], [5, 6]).sparse
    assert sparse.decode_kv_bytes == 5 * 2**20
    assert sparse.second_token_s == 2.25
    assert sparse.token_s == 0.5
    text = printed(compared([7, 8], [5, 6]))
    assert "40.0 MiB" in text
    assert "5.0 MiB" in text
    assert "0.125" in text


def test_questions_are_shown_in_the_order_of_the_document() -> None:
    text = printed(compared([7, 8], [5, 6]))
    assert text.index("[3, 4]") < text.index("[5, 6]")

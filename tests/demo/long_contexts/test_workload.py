# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from vllm_relay.demo.long_contexts.workload import chronicle_workload, max_questions
from vllm_relay.demo.requests import Request, tokenize
from vllm_relay.demo.tokenizer import UNK_TOKEN_ID, build_tokenizer
from vllm_relay.demo.workload import Conversations

SIZES = {"document_tokens": 4096, "num_questions": 200, "output_tokens": 8}
TOKENIZER = build_tokenizer(32768)


def requests_of(workload: Conversations, num_questions: int) -> list[Request]:
    questions = workload.questions[:num_questions]
    return tokenize(TOKENIZER, [replace(workload, questions=questions)])


def followers(tokens: list[int]) -> dict[tuple[int, int], set[int]]:
    """By two adjacent tokens: everything that follows them anywhere."""
    found: dict[tuple[int, int], set[int]] = defaultdict(set)
    for pair, follower in zip(pairwise(tokens), tokens[2:], strict=False):
        found[pair].add(follower)
    return found


def token_ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False, verbose=False)


@pytest.mark.parametrize("document_tokens", [4096, 4097, 5555, 8000, 31_999, 32_000])
@pytest.mark.parametrize("output_tokens", [2, 3, 8])
def test_one_continuation_is_right(document_tokens: int, output_tokens: int) -> None:
    workload = chronicle_workload(
        document_tokens=document_tokens, num_questions=200, output_tokens=output_tokens
    )
    document = token_ids(workload.system_prompt)
    assert len(document) == len(workload.system_prompt.split()) == document_tokens
    assert UNK_TOKEN_ID not in document
    in_document = followers(document)
    for question in workload.questions:
        asked, answer = token_ids(question.text), token_ids(question.continuation or "")
        assert len(answer) == output_tokens
        assert UNK_TOKEN_ID not in asked + answer
        in_question = followers(document[-2:] + asked)
        recited = [*asked[-2:], *answer]
        for pair, right in zip(pairwise(recited), recited[2:], strict=False):
            assert in_document[pair] | in_question.get(pair, set()) == {right}


def test_questions_end_the_prompt_and_share_the_document() -> None:
    workload = chronicle_workload(**SIZES)
    document = token_ids(workload.system_prompt)
    for request, question in zip(requests_of(workload, 5), workload.questions, strict=False):
        asked, answer = token_ids(question.text), token_ids(question.continuation or "")
        assert request.prompt_token_ids[2 : 2 + len(document)] == document
        assert request.prompt_token_ids[-len(asked) :] == asked
        assert request.expected_token_ids == answer


def test_prompt_and_answer_fit_the_model() -> None:
    workload = chronicle_workload(document_tokens=32_000, num_questions=400, output_tokens=8)
    assert max(len(r.prompt_token_ids) for r in requests_of(workload, 20)) + 8 <= 32_100


@pytest.mark.parametrize("document_tokens", [4096, 32_000])
@pytest.mark.parametrize("num_questions", [5, 200])
def test_answers_lie_all_over_the_document(document_tokens: int, num_questions: int) -> None:
    workload = chronicle_workload(document_tokens=document_tokens, num_questions=num_questions)
    pairs = list(pairwise(token_ids(workload.system_prompt)))
    keys = [tuple(token_ids(question.text)[-2:]) for question in workload.questions]
    places = sorted(map(pairs.index, keys))
    assert len(set(places)) == num_questions
    assert places[0] < 120
    assert places[-1] == document_tokens - 4
    apart = document_tokens / (num_questions - 1)
    assert max(after - before for before, after in pairwise(places)) < apart + 100


@pytest.mark.parametrize("document_tokens", [4096, 10_000, 32_000])
def test_every_document_has_two_hundred_questions(document_tokens: int) -> None:
    assert max_questions(document_tokens) >= 200


def test_same_seed_same_workload() -> None:
    assert chronicle_workload(**SIZES, seed=4) == chronicle_workload(**SIZES, seed=4)
    assert chronicle_workload(**SIZES, seed=4) != chronicle_workload(**SIZES, seed=5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"document_tokens": 4095}, "document_tokens is 4095, expected 4096 to 32000"),
        ({"document_tokens": 32_001}, "document_tokens is 32001, expected 4096 to 32000"),
        ({"document_tokens": 0}, "document_tokens is 0"),
        ({"num_questions": 0}, "num_questions is 0, expected 1 to 203"),
        ({"num_questions": 204}, "num_questions is 204, expected 1 to 203"),
        ({"output_tokens": 1}, "output_tokens is 1, expected 2 to 8"),
        ({"output_tokens": 9}, "output_tokens is 9, expected 2 to 8"),
    ],
)
def test_numbers_out_of_range_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chronicle_workload(**{**SIZES, **changes})

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from vllm_relay.demo.requests import Request, tokenize
from vllm_relay.demo.tokenizer import UNK_TOKEN_ID, build_tokenizer
from vllm_relay.demo.words import ADJECTIVES, CITIES, NOUNS, PLACES, PROSE
from vllm_relay.demo.workload import handbook_workload, ledger_workload

SIZES = {
    "num_system_prompts": 3,
    "system_prompt_tokens": 2000,
    "questions_per_prompt": 20,
    "output_tokens": 30,
}


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return tokenize(build_tokenizer(4096), ledger_workload(**SIZES))


def test_same_seed_same_workload() -> None:
    assert ledger_workload(**SIZES, seed=4) == ledger_workload(**SIZES, seed=4)
    assert ledger_workload(**SIZES, seed=4) != ledger_workload(**SIZES, seed=5)


def test_sizes_are_as_asked(requests: list[Request]) -> None:
    assert len(requests) == 60
    for request in requests:
        assert len(request.expected_token_ids) == 30
        assert 1990 <= len(request.prompt_token_ids) <= 2030


def test_every_word_is_in_the_vocabulary(requests: list[Request]) -> None:
    for request in requests:
        assert UNK_TOKEN_ID not in request.prompt_token_ids
        assert UNK_TOKEN_ID not in request.expected_token_ids


def test_word_lists_are_disjoint() -> None:
    words = [w.lower() for w in [*CITIES, *PLACES, *ADJECTIVES, *NOUNS, *PROSE]]
    assert len(words) == len(set(words))


def test_answer_follows_the_only_earlier_occurrence_of_the_key(requests: list[Request]) -> None:
    for request in requests:
        tokens, answer = request.prompt_token_ids, request.expected_token_ids
        key = tokens[-2:]
        (begin,) = [i for i in range(len(tokens) - 2) if tokens[i : i + 2] == key]
        assert tokens[begin + 2 : begin + 2 + len(answer)] == answer


def test_recitation_is_never_ambiguous(requests: list[Request]) -> None:
    for request in requests:
        occurrences = Counter(pairwise(request.prompt_token_ids[:-2]))
        recited = [*request.prompt_token_ids[-2:], *request.expected_token_ids[:-1]]
        assert all(occurrences[pair] == 1 for pair in pairwise(recited))


def test_questions_of_one_prompt_differ(requests: list[Request]) -> None:
    prompts = [tuple(r.prompt_token_ids) for r in requests]
    assert len(set(prompts)) == len(prompts)


def test_system_prompts_take_turns(requests: list[Request]) -> None:
    prefixes = [tuple(r.prompt_token_ids[:1900]) for r in requests]
    assert prefixes[:3] * 20 == prefixes
    assert len(set(prefixes)) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_system_prompts": 0}, "num_system_prompts is 0"),
        ({"questions_per_prompt": 0}, "questions_per_prompt is 0"),
        ({"output_tokens": 1}, "output_tokens is 1"),
        ({"system_prompt_tokens": 10}, "has 0 entries"),
        ({"system_prompt_tokens": 100}, "expected at least 20"),
        ({"system_prompt_tokens": 10_000}, "too long"),
    ],
)
def test_impossible_ledger_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ledger_workload(**{**SIZES, **changes})


@pytest.mark.parametrize("system_prompt_words", [1, 5, 700])
def test_handbooks_have_the_length_asked_for(system_prompt_words: int) -> None:
    workload = handbook_workload(
        num_system_prompts=3, system_prompt_words=system_prompt_words, questions_per_prompt=4
    )
    assert [len(c.system_prompt.split()) for c in workload] == [system_prompt_words] * 3
    assert [len({q.text for q in c.questions}) for c in workload] == [4] * 3
    assert all(q.continuation is None for c in workload for q in c.questions)

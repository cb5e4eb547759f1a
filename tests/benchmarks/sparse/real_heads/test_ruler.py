# SPDX-License-Identifier: Apache-2.0
"""Haystacks hold what is right, and nothing else is."""

from __future__ import annotations

import pytest

from benchmarks.sparse.real_heads import ruler
from benchmarks.sparse.real_heads.texts import files, passages


class Words:
    """A tokenizer of words."""

    def __init__(self) -> None:
        self._words: dict[str, int] = {}

    def encode(self, text: str, verbose: bool = True) -> list[int]:
        return [self._words.setdefault(word, len(self._words)) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        of = {number: word for word, number in self._words.items()}
        return " ".join(of[number] for number in ids)


@pytest.mark.parametrize("seed", [0, 1])
def test_haystacks(seed: int) -> None:
    tokenizer = Words()
    needles, common = ruler.haystacks(tokenizer, 900, seed)
    for haystack in (needles, common):
        assert 700 < len(tokenizer.encode(haystack.text)) < 960
        for question in haystack.questions:
            assert question.score(question.answer) == 1
            assert question.score("") == 0
            assert all(string in haystack.text for string in question.expected)
            assert not any(string in question.prompt for string in question.expected)
    tasks = [question.task for h in (needles, common) for question in h.questions]
    assert tasks == [
        "single key", "multi-key", "multi-value", "multi-query", "variable tracking",
        "common words",
    ]  # fmt: skip
    assert (ruler.NOISE in needles.text) == (seed == 0)
    assert ruler.haystacks(tokenizer, 900, seed) == [needles, common]


def test_the_common_words_are_the_most_common() -> None:
    question = ruler.haystacks(Words(), 900, 0)[1].questions[0]
    listed = ruler.haystacks(Words(), 900, 0)[1].text.split()[1::2]
    counts = sorted({word: listed.count(word) for word in listed}.items(), key=lambda x: -x[1])
    assert {word for word, _ in counts[:3]} == set(question.expected)
    assert counts[2][1] > 3 * counts[3][1]


def test_a_score_is_the_share_of_the_expected_strings() -> None:
    question = ruler.Question("multi-value", "are:", " 1, 2.", ("12", "34"), 8)
    assert question.score(" 34 and 56") == 0.5


@pytest.mark.parametrize("kind", ["English", "code"])
def test_what_is_reported_was_not_chosen_on(kind: str) -> None:
    choosing, reporting = files(kind, "choosing"), files(kind, "reporting")
    assert choosing and reporting and not set(choosing) & set(reporting)


def test_passages_lie_behind_each_other() -> None:
    tokenizer = Words()
    found = passages(tokenizer, "English", "choosing", [50, 20])
    assert [len(passage.token_ids) for passage in found] == [50, 20]
    whole = passages(tokenizer, "English", "choosing", [70])[0].token_ids
    assert found[0].token_ids + found[1].token_ids == whole
    with pytest.raises(ValueError, match="expected at most"):
        passages(tokenizer, "English", "choosing", [10**7])

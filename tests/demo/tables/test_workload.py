# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from vllm_relay.demo.tables.engine import BLOCK_SIZE_TOKENS, NUM_BLOCKS
from vllm_relay.demo.tables.workload import TEMPLATE, tables_workload
from vllm_relay.demo.tokenizer import build_tokenizer
from vllm_relay.tables import llm_map
from vllm_relay.tables.engines.base import Completion, Prompt, PromptShape
from vllm_relay.tables.ordering.cached_tokens import BlockCache
from vllm_relay.tables.question import Question


class RecallEngine:
    """What the recall model does, as a search in the text: words that followed the last two."""

    identity = "recall"
    cache = BlockCache(BLOCK_SIZE_TOKENS, NUM_BLOCKS - 1)
    max_model_len = 1024
    max_running = 4

    def __init__(self) -> None:
        self.tokenizer: Any = build_tokenizer(1024)
        self.num_prompts = 0

    def generate(self, prompts: Iterable[Prompt], question: Question) -> Iterator[Completion]:
        for prompt in prompts:
            self.num_prompts += 1
            words = prompt.token_ids
            pairs = list(zip(words, words[1:], strict=False))
            places = [i for i, pair in enumerate(pairs[:-1]) if pair == pairs[-1]]
            assert len(places) == 1, "the key is on the page once, and last"
            follow = words[places[0] + 2 : places[0] + 4]
            text = self.tokenizer.decode(follow[:1] if question.output.choices else follow)
            yield Completion(prompt.number, text)

    def max_answer_tokens(self, question: Question) -> int:
        return question.max_tokens

    def prompts_per_s(self, shape: PromptShape, question: Question) -> None:
        return None

    def close(self) -> None:
        pass


@pytest.mark.parametrize("order", ["auto", "keep", "fixed", "per_row"])
@pytest.mark.parametrize(
    ("num_rows", "seed"), [(1, 0), (2, 1), (3, 2), (10, 3), (10, 4), (40, 5), (200, 6)]
)
def test_prompts_have_their_answer_in_every_order(num_rows: int, seed: int, order: Any) -> None:
    workload = tables_workload(num_rows=num_rows, seed=seed)
    assert workload.num_rows == num_rows
    for question in workload.questions:
        asked = question.question
        result = llm_map(
            pa.table(workload.columns),
            asked.text,
            asked.fields,
            engine=RecallEngine(),
            choices=asked.output.choices or None,
            max_tokens=asked.max_tokens,
            order=order,
            template=TEMPLATE,
        )
        assert result.objects == question.answers


def test_all_words_are_in_the_vocabulary() -> None:
    tokenizer = build_tokenizer(1024)
    workload = tables_workload(num_rows=50, seed=0)
    texts = [cell for cells in workload.columns.values() for cell in cells]
    texts += [each.question.text for each in workload.questions]
    texts += [answer for each in workload.questions for answer in each.answers]
    assert all(tokenizer.unk_token_id not in tokenizer(text)["input_ids"] for text in texts)


def test_rows_and_gates_repeat_as_said() -> None:
    workload = tables_workload(num_rows=400, seed=0)
    rows = list(zip(*workload.columns.values(), strict=True))
    assert len(set(rows)) < 300
    # a gate stands on one page and in one district
    assert len(set(rows)) == len(set(workload.columns["gate"]))


def test_the_same_seed_makes_the_same_table() -> None:
    made = [tables_workload(num_rows=20, seed=seed) for seed in (3, 3, 4)]
    assert made[0] == made[1] != made[2]


def test_a_table_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="num_rows is 0, expected at least 1"):
        tables_workload(num_rows=0, seed=0)

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest

from vllm_relay.demo.modules.workload import SCHEMA_NAME, PartsWorkload, parts_workload
from vllm_relay.demo.tokenizer import build_tokenizer
from vllm_relay.modules.prompt.schema_store import SchemaStore

SIZES: dict[str, Any] = {
    "num_parts": 6,
    "part_tokens": 700,
    "parts_per_question": 3,
    "num_questions": 20,
    "output_tokens": 4,
}


def workload(seed: int = 0, **sizes: int) -> PartsWorkload:
    return parts_workload(**{**SIZES, **sizes}, seed=seed)


def test_one_of_the_parts_has_the_answer() -> None:
    made = workload()
    assert len(made.parts) == 6 and len(made.questions) == 20
    places = set()
    for question in made.questions:
        assert len(set(question.parts)) == len(question.parts) == 3
        key = " ".join(question.text.rstrip("?.").split()[-2:])
        [right] = [number for number, part in enumerate(made.parts) if f"{key}:" in part]
        assert right in question.parts
        [line] = [line for line in made.parts[right].split("\n") if f"{key}:" in line]
        assert question.answer.strip().split()[0] in line
        places.add(question.parts.index(right))
    assert places == {0, 1, 2}


def test_parts_end_with_their_lines() -> None:
    made = workload()
    assert all(part.endswith("\n") and not part.startswith("\n") for part in made.parts)


@pytest.mark.parametrize("parts_per_question", [1, 6])
def test_prompts_import_their_parts(parts_per_question: int) -> None:
    made = workload(parts_per_question=parts_per_question)
    store = SchemaStore(build_tokenizer(8192), block_size=32)
    store.add(made.schema)
    assert store.names() == [SCHEMA_NAME]
    for question in made.questions:
        imported = set(store.render(question.prompt).module_tokens) - {""}
        assert imported == {f"part{number}" for number in question.parts}


def test_the_same_seed_makes_the_same_workload() -> None:
    assert workload(seed=3) == workload(seed=3) != workload(seed=4)


@pytest.mark.parametrize("parts_per_question", [0, 7])
def test_more_parts_than_there_are_cannot_be_asked_for(parts_per_question: int) -> None:
    with pytest.raises(ValueError, match="expected 1 to num_parts=6"):
        workload(parts_per_question=parts_per_question)

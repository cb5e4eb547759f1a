# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.depth import cases
from tests.tables.recording_engine import RecordingEngine
from vllm_relay.tables import NearDuplicates, llm_map

LONG = "The quick brown fox jumps over the lazy dog near the river bank every single morning"


def test_rows_that_are_nearly_equal_share_an_answer() -> None:
    texts = [LONG, LONG + "!", LONG.upper().replace(" ", "  "), LONG, "Something else", None, None]
    engine = RecordingEngine()
    table = pa.table({"s": texts, "n": [1, 1, 1, 2, 1, None, 1]})
    result = llm_map(table, "q", engine=engine, near_duplicates=0.9)
    assert result[0] == result[1] == result[2] != result[3]
    assert result[5] is None and result[6] is not None
    assert len(engine.messages) == 4
    assert result.num_near_duplicates == 2
    plain = llm_map(table, "q", engine=engine)
    assert len(engine.messages) == 4 + 6
    assert plain.num_near_duplicates == 0


def jaccard(first: str, second: str) -> float:
    sets = [
        {each[i : i + 5] for i in range(max(len(each) - 4, 1))}
        for each in (" ".join(first.casefold().split()), " ".join(second.casefold().split()))
    ]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


WORDS = st.sampled_from(["a", "wide", "river", "River", "bank", "é", ""])


@settings(max_examples=cases(30), deadline=None)
@given(
    st.lists(st.none() | st.lists(WORDS, max_size=8).map(" ".join), max_size=12),
    st.sampled_from([0.3, 0.7, 1.0]),
)
def test_every_row_is_similar_to_the_one_that_is_asked_about(
    texts: list[str | None], similarity: float
) -> None:
    engine = RecordingEngine(lambda row: "<" + row["s"] + ">")
    table = pa.table({"s": pa.array(texts, pa.string())})
    result = llm_map(table, "q", engine=engine, near_duplicates=similarity)
    asked = set()
    for text, answer in zip(texts, result, strict=True):
        if text is None:
            assert answer is None
            continue
        own = answer[1:-1]
        asked.add(own)
        assert own in texts
        assert jaccard(text, own) >= similarity
    assert len(engine.messages) == len(asked)
    differing = sum(
        answer != f"<{text}>"
        for text, answer in zip(texts, result, strict=True)
        if text is not None
    )
    assert result.num_near_duplicates == differing


def test_vectors_are_compared_too() -> None:
    vectors = {"a": [1.0, 0.0], "b": [0.99, 0.1], "c": [0.0, 1.0], "d": [0.9, 0.4]}
    engine = RecordingEngine(lambda row: row["s"])

    def embed(texts: list[str]) -> Any:
        return [vectors[text] for text in texts]

    frame = pd.DataFrame({"s": ["a", "b", "c", "d", "b"]}, index=[5, 4, 3, 2, 1])
    result = llm_map(frame, "q", engine=engine, near_duplicates=NearDuplicates(0.95, embed))
    assert result.values.tolist() == ["a", "a", "c", "d", "a"]
    assert result.values.index.tolist() == [5, 4, 3, 2, 1]
    assert (len(engine.messages), result.num_near_duplicates) == (3, 2)


@pytest.mark.parametrize("given_similarity", [0, 1.5, -1, True, "0.9"])
def test_a_similarity_is_a_share(given_similarity: Any) -> None:
    with pytest.raises(ValueError, match="expected a similarity above 0, 1 at most"):
        NearDuplicates(given_similarity)


def test_texts_of_several_columns_are_in_the_order_of_the_columns() -> None:
    names = list("abcdefgh")
    shown: list[str] = []

    def embed(texts: list[str]) -> list[list[float]]:
        shown.extend(texts)
        return [[1.0]] * len(texts)

    table = pa.table({name: [f"{name} 0", f"{name} 1"] for name in names})
    llm_map(table, "q", engine=RecordingEngine(), near_duplicates=NearDuplicates(0.9, embed))
    # which rows share an answer is the same in every process
    assert shown == ["\n".join(f"{name} {row}" for name in names) for row in range(2)]


def test_embeddings_are_checked_first() -> None:
    with pytest.raises(TypeError, match="expected a function from a list of texts"):
        NearDuplicates(0.9, 3)

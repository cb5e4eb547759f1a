# SPDX-License-Identifier: Apache-2.0
"""What hosts have in common: a question that comes to any process."""

from __future__ import annotations

import json
import pickle
from typing import Any, Literal

import pyarrow as pa
import pytest
from pydantic import BaseModel

from tests.tables.engines.server.fake_server import OTHER_MODEL, Reply, chat_answer, fake_server
from vllm_relay.tables.hosts.batches import (
    BatchQuestion,
    host_module,
    leading_field,
)
from vllm_relay.tables.outputs import Output

ADDRESS = "http://localhost:1"


def echo(body: dict[str, Any]) -> Reply:
    return chat_answer(body["messages"][-1]["content"].rpartition(": ")[2].strip('"'))


def question(**changes: Any) -> BatchQuestion:
    return BatchQuestion(**{"prompt": "What is {x}?", "fields": None, "engine": ADDRESS, **changes})


def test_a_question_travels() -> None:
    with fake_server(echo, model=OTHER_MODEL) as server:
        sent = pickle.loads(pickle.dumps(question(engine=server.url, errors_into="why")))
        batch = pa.table({"x": ["a", "b", "a", None], "y": [1, 2, 3, 4]})
        found = sent.ask(batch)
        assert found.column_names == ["x", "y", "answer", "why"]
        assert found["answer"].to_pylist() == ["a", "b", "a", None]
        assert found["y"].to_pylist() == [1, 2, 3, 4]
        assert len(server.bodies) == 2
        again = sent.ask(batch.slice(0, 0))
        assert again.schema == found.schema and again.num_rows == 0


def test_errors_stand_beside_their_rows() -> None:
    with fake_server(lambda body: chat_answer("x"), model=OTHER_MODEL) as server:
        asked = question(engine=server.url, errors_into="why", options={"output": "int"})
        found = asked.ask(pa.table({"x": ["a"]}))
    assert found["answer"].to_pylist() == [None]
    assert found["answer"].type == pa.int64()
    assert "'x'" in found["why"][0].as_py()


class Film(BaseModel):
    year: int
    tags: list[Literal["old", "new"]]


@pytest.mark.parametrize(
    "output",
    [
        Film,
        Film.model_json_schema(),
        "STRUCT(year BIGINT, tags ENUM('old', 'new')[])",
        Output.of("STRUCT(year BIGINT, tags ENUM('old', 'new')[])"),
    ],
)
def test_structs_are_columns_of_texts_and_numbers(output: Any) -> None:
    answer = {"year": 1927, "tags": ["old"]}
    with fake_server(lambda body: chat_answer(json.dumps(answer)), model=OTHER_MODEL) as server:
        sent = pickle.loads(pickle.dumps(question(engine=server.url, options={"output": output})))
        found = sent.ask(pa.table({"x": ["a", None]}))
        nothing = sent.ask(pa.table({"x": pa.array([], pa.string())}))
    assert found["answer"].to_pylist() == [answer, None]
    # neither Spark nor Daft has dictionaries in structs
    element = found["answer"].type.field("tags").type.value_type
    assert (found["answer"].type.field("year").type, element) == (pa.int64(), pa.string())
    assert nothing.schema == found.schema
    assert sent.answer_fields == [found.schema.field("answer")]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"engine": object()}, TypeError, "each worker opens its own"),
        ({"engine": []}, TypeError, "each worker opens its own"),
        ({"options": {"max_token": 5}}, TypeError, r"\['max_token'\].*no options.*'max_tokens'"),
        ({"options": {"show_progress": True}}, ValueError, "show_progress.*one process"),
        ({"options": {"replicas": 2}}, ValueError, "replicas.*one table in one process"),
        ({"options": {"checkpoint": "f"}}, ValueError, "checkpoint.*one table in one process"),
        ({"prompt": "What?"}, ValueError, "names no column"),
        ({"options": {"output": "number"}}, (TypeError, ValueError), "number"),
    ],
)
def test_what_cannot_be_is_refused_here(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        question(**changes)


def test_columns_are_checked() -> None:
    with pytest.raises(ValueError, match=r"\['x'\] are no columns"):
        question().check(["a", "b"])
    with pytest.raises(ValueError, match="column 'answer' is there already"):
        question().check(["x", "answer"])


def test_names_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="into and errors_into are both 'y'"):
        question(into="y", errors_into="y").check(["x"])
    with pytest.raises(ValueError, match="sort_by='z' given"):
        question().check(["x", "y"], "z")
    for each in (None, "auto", "y"):
        question().check(["x", "y"], each)
    with pytest.raises(ValueError, match=r"expected one of \['x'\]"):
        question().check(["x", "y"], "y", ["x"])
    with pytest.raises(ImportError, match=r"pip install 'vllm-relay\[spark\]'"):
        host_module("no_such_package", "spark")


def test_the_leading_field_saves_most() -> None:
    table = pa.table(
        {
            "id": list(range(100)),
            "title": [f"title {row % 10}" for row in range(100)],
            "text": ["a long description " * 5 + str(row % 12) for row in range(100)],
            "tags": [["x"]] * 100,
        }
    )
    assert leading_field(table, ["id", "title", "text"]) == "text"
    assert leading_field(table, ["id", "title"]) == "title"
    # Ray cannot sort by lists
    assert leading_field(table, ["id", "tags"]) == "id"
    assert leading_field(table, ["tags"]) is None
    assert leading_field(table.slice(0, 0), ["id", "title"]) in ("id", "title")

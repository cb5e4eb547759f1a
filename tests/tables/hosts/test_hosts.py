# SPDX-License-Identifier: Apache-2.0
"""Ray Data, Spark and Daft ask about their rows; each test needs its host installed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from tests.support.one_ray import one_ray
from tests.tables.engines.server.fake_server import (
    OTHER_MODEL,
    FakeServer,
    Reply,
    chat_answer,
    fake_server,
)

pytestmark = pytest.mark.hosts

NUM_ROWS = 120


def rows() -> pa.Table:
    numbers = range(NUM_ROWS)
    return pa.table(
        {
            "number": list(numbers),
            "product": [f"product {n % 7}: " + "described at length " * 8 for n in numbers],
            "review": [None if n % 10 == 0 else f"review {n % 60}" for n in numbers],
        }
    )


def last_field(body: dict[str, Any]) -> Reply:
    """The review, wherever it stands; as a struct if a schema is given."""
    lines = body["messages"][-1]["content"].split("\n")
    (review,) = (line for line in lines if line.startswith('"review": '))
    text = review.removeprefix('"review": ').strip('"')
    return chat_answer(struct_of(text) if "response_format" in body else text)


def struct_of(review: str) -> str:
    return json.dumps({"kinds": ["new", "new"], "about": {"review": review, "stars": 3}})


STRUCT = "STRUCT(kinds ENUM('new', 'old')[], about STRUCT(review VARCHAR, stars INTEGER))"


@pytest.fixture(params=["text", STRUCT], ids=["texts", "structs"])
def output(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def alone_with_ray() -> Iterator[None]:
    with one_ray():
        yield


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server(last_field, model=OTHER_MODEL) as found:
        yield found


def check(found: pa.Table, output: str) -> None:
    assert found.num_rows == NUM_ROWS
    listed = sorted(found.to_pylist(), key=lambda row: row["number"])
    given = rows().to_pylist()
    assert [row["number"] for row in listed] == list(range(NUM_ROWS))
    for row, expected in zip(listed, given, strict=True):
        assert row["product"] == expected["product"] and row["review"] == expected["review"]
        text = "null" if expected["review"] is None else expected["review"]
        assert row["answer"] == (text if output == "text" else json.loads(struct_of(text)))
        assert row["why"] is None


QUESTION = "Is {review} of {product}?"
NUM_DIFFERENT = len({(row["product"], row["review"]) for row in rows().to_pylist()})


def test_ray_data(server: FakeServer, alone_with_ray: None, output: str) -> None:
    ray = pytest.importorskip("ray")
    from vllm_relay.tables.hosts.ray_data import llm_map

    # workers import the package from where this process has it
    environment = {"env_vars": {"PYTHONPATH": ":".join(filter(None, sys.path))}}
    # one of its own, whatever runs beside it
    ray.init(
        "local",
        num_cpus=2,
        include_dashboard=False,
        runtime_env=environment,
        log_to_driver=False,
    )
    try:
        dataset = ray.data.from_arrow(rows()).repartition(4)
        options = {"errors_into": "why", "output": output}
        answered = llm_map(dataset, QUESTION, engine=server.url, batch_rows=32, **options)
        assert server.bodies == [], "nothing is asked before it is read"
        tables = [ray.get(each) for each in answered.to_arrow_refs()]
        check(pa.concat_tables(tables), output)
        with pytest.raises(ValueError, match="are no columns"):
            llm_map(dataset, "{nothing}", engine=server.url)
        nothing = ray.data.from_arrow(rows().slice(0, 0))
        assert llm_map(nothing, QUESTION, engine=server.url).take_all() == []
    finally:
        ray.shutdown()
    # sorted: equal rows meet in a batch but for those at the edges
    assert NUM_DIFFERENT <= len(server.bodies) <= NUM_DIFFERENT + 4


def test_daft(server: FakeServer, output: str) -> None:
    daft = pytest.importorskip("daft")
    from vllm_relay.tables.hosts.daft import llm_map

    frame = daft.from_arrow(rows())
    answered = llm_map(frame, QUESTION, engine=server.url, errors_into="why", output=output)
    check(answered.to_arrow(), output)
    with pytest.raises(ValueError, match="'number' is there already"):
        llm_map(frame, QUESTION, engine=server.url, into="number")
    assert len(server.bodies) >= NUM_DIFFERENT


def test_spark(server: FakeServer, output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sql = pytest.importorskip("pyspark.sql")
    from vllm_relay.tables.hosts.spark import llm_map

    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, sys.path)))
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    session = (
        sql.SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .getOrCreate()
    )
    try:
        frame = session.createDataFrame(rows().to_pandas())
        options = {"errors_into": "why", "output": output}
        answered = llm_map(frame, QUESTION, engine=server.url, partitions=2, **options)
        assert answered.columns == ["number", "product", "review", "answer", "why"]
        check(pa.Table.from_pylist([each.asDict(True) for each in answered.collect()]), output)
    finally:
        session.stop()
    assert len(server.bodies) == NUM_DIFFERENT, "equal rows are asked once in the whole frame"

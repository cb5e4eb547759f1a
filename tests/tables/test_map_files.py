# SPDX-License-Identifier: Apache-2.0
"""Answers are written while a job runs, and a job that was killed goes on."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.waiting import wait_for
from tests.tables.recording_engine import RecordingEngine, Refusal, Row
from vllm_relay.tables import llm_map_file
from vllm_relay.tables.jobs.options import TokenBudgetError
from vllm_relay.tables.map_files import _parts

LIMIT_MB = 40
"""More than few rows take: blocks that were freed. 200,000 rows with their answers are above."""


def ask(source: Any, target: Path, engine: RecordingEngine | None = None, **options: Any) -> Any:
    asked = engine or RecordingEngine(lambda row: row["name"].upper())
    return llm_map_file(source, target, "What is {name}?", engine=asked, **options)


def names(count: int) -> pa.Table:
    return pa.table({"id": list(range(count)), "name": [f"name {i % 7}" for i in range(count)]})


@pytest.mark.parametrize("batch_rows", [1, 4, 10, 100])
def test_rows_and_answers_are_in_the_order_of_the_source(tmp_path: Path, batch_rows: int) -> None:
    table = names(10)
    engine = RecordingEngine(lambda row: row["name"].upper())
    target = tmp_path / "out.parquet"
    report = ask(table.to_reader(3), target, engine, batch_rows=batch_rows)
    found = pq.ParquetFile(target)
    assert found.num_row_groups == -(-10 // batch_rows)
    written = found.read()
    assert written.select(["id", "name"]).equals(table)
    assert written["answer"].to_pylist() == [f"NAME {i % 7}" for i in range(10)]
    assert written["error"].null_count == 10
    # rows that are equal are asked about once, in whichever part they are
    assert len(engine.messages) == 7
    assert report.num_rows == 10 and report.prompt_tokens == 70
    assert [path.name for path in tmp_path.iterdir()] == ["out.parquet"]


@given(st.lists(st.integers(0, 7), max_size=6), st.integers(1, 6))
def test_parts_have_all_rows(sizes: list[int], num_rows: int) -> None:
    table = pa.table({"id": pa.array(range(sum(sizes)), pa.int64())})
    begins = [sum(sizes[:place]) for place in range(len(sizes))]
    batches = [
        pa.record_batch({"id": table["id"].slice(begin, size).combine_chunks()})
        for begin, size in zip(begins, sizes, strict=True)
    ]
    parts = list(_parts(pa.RecordBatchReader.from_batches(table.schema, batches), num_rows))
    assert [part.num_rows for part in parts[:-1]] == [num_rows] * (len(parts) - 1)
    assert all(0 < part.num_rows <= num_rows for part in parts)
    assert [row for part in parts for row in part["id"].to_pylist()] == table["id"].to_pylist()


def test_errors_have_a_column(tmp_path: Path) -> None:
    def answer(row: Row) -> str:
        if row["name"] == "name 3":
            raise Refusal("no such name")
        return "5"

    target = tmp_path / "out.parquet"
    report = ask(names(8).to_reader(), target, RecordingEngine(answer), output="int", batch_rows=3)
    written = pq.read_table(target)
    assert written["answer"].to_pylist() == [5, 5, 5, None, 5, 5, 5, 5]
    assert written["error"].to_pylist() == [None] * 3 + ["no such name"] + [None] * 4
    assert report.num_errors == 1


def test_no_rows_give_a_file_without_rows(tmp_path: Path) -> None:
    ask(names(0).to_reader(), tmp_path / "out.parquet", output="bool")
    written = pq.read_table(tmp_path / "out.parquet")
    assert written.num_rows == 0 and written.schema.field("answer").type == pa.bool_()


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (names(3), {"fields": ["name", "page"]}, "field 'page' given, which is no column"),
        (names(3), {"batch_rows": 0}, "batch_rows=0 given, expected at least 1"),
        (names(3).rename_columns(["error", "name"]), {}, r"columns \['error'\] given.*rename"),
    ],
)
def test_refused_before_there_is_a_file(
    tmp_path: Path, source: pa.Table, options: dict[str, Any], message: str
) -> None:
    engine = RecordingEngine()
    with pytest.raises(ValueError, match=message):
        ask(source.to_reader(), tmp_path / "out.parquet", engine, **options)
    assert not engine.messages and not list(tmp_path.iterdir())


def test_the_source_is_not_written_over(tmp_path: Path) -> None:
    file = tmp_path / "t.parquet"
    pq.write_table(names(3), file)
    with pytest.raises(ValueError, match="given as source and output"):
        ask(str(file), tmp_path / "." / "t.parquet", RecordingEngine())
    assert pq.read_table(file).equals(names(3))
    with pytest.raises(TypeError, match="a source of type Table given.*use llm_map"):
        ask(names(3), tmp_path / "out.parquet", RecordingEngine())


def test_a_budget_is_one_of_all_parts(tmp_path: Path) -> None:
    engine = RecordingEngine(lambda row: row["name"])
    target = tmp_path / "out.parquet"
    target.write_text("of an earlier job")
    given = {"batch_rows": 2, "max_tokens": 1, "checkpoint": tmp_path / "answers"}
    told = r"budget of 50 tokens is spent \(33 used\).*answers keeps the answers that came"
    with pytest.raises(TokenBudgetError, match=told):
        ask(names(7).to_reader(), target, engine, max_total_tokens=50, **given)
    # eleven tokens each
    assert 2 < len(engine.messages) < 5
    assert target.read_text() == "of an earlier job"
    assert not (tmp_path / "out.parquet.part").exists()
    ask(names(7).to_reader(), target, engine, **given)
    assert len(engine.messages) == 7 and pq.read_table(target).num_rows == 7


def start(folder: Path, *numbers: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.tables.map_file_main", str(folder), *map(str, numbers)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(process: subprocess.Popen[str]) -> int:
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr[-4000:]
    return int(stdout)


@pytest.mark.parametrize("num_rows", [600, pytest.param(20_000, marks=pytest.mark.soak)])
def test_a_killed_job_leaves_no_file_and_asks_only_what_is_missing(
    tmp_path: Path, num_rows: int
) -> None:
    log = tmp_path / "asked"
    held_at = num_rows // 2 + 7
    process = start(tmp_path, num_rows, num_rows // 4, held_at)
    wait_for(
        lambda: (
            (log.exists() and log.read_text().count("\n") == held_at) or process.poll() is not None
        )
    )
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "answers.parquet").exists()
    finished(start(tmp_path, num_rows, num_rows // 4))
    written = pq.read_table(tmp_path / "answers.parquet")
    assert written["id"].to_pylist() == list(range(num_rows))
    assert written["answer"].to_pylist() == [f"number {i}" for i in range(num_rows)]
    # one may have been answered and not yet kept
    assert log.read_text().count("\n") <= num_rows + 1
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".parquet") == [
        "answers.parquet",
        "source.parquet",
    ]


@pytest.mark.parametrize("num_rows", [pytest.param(200_000, marks=pytest.mark.soak), 12_000])
def test_more_rows_take_no_more_memory(tmp_path: Path, num_rows: int) -> None:
    batch_rows = num_rows // 20
    peaks = []
    for name, rows in (("few", 2 * batch_rows), ("many", num_rows)):
        (tmp_path / name).mkdir()
        peaks.append(finished(start(tmp_path / name, rows, batch_rows)))
    print(f"{num_rows} rows in parts of {batch_rows}: {[round(each / 1e6) for each in peaks]} MB")
    assert peaks[1] < peaks[0] + LIMIT_MB * 1_000_000

# SPDX-License-Identifier: Apache-2.0
"""Planning a bucket does not hold up asking about another."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterable

import pyarrow as pa
import pytest

from tests.support.waiting import WAIT_S
from tests.tables.byte_tokenizer import byte_tokenizer
from tests.tables.fake_engine import FakeEngine
from tests.tables.jobs.job_cases import NUMBERS, NUMBERS_SQL, answered, numbers_table, runner
from vllm_relay.tables.engines.base import Completion, Completions, Prompt
from vllm_relay.tables.jobs.options import JobOptions
from vllm_relay.tables.jobs.prompts.planner import (
    Limits,
    OrderedRows,
    PlannedPrompt,
    Planner,
    RefusedRow,
    plan_prompts,
)
from vllm_relay.tables.ordering.cached_tokens import BlockCache
from vllm_relay.tables.question import Question


def test_a_bucket_is_ordered_while_another_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    second_is_ordered, first_is_asked = threading.Event(), threading.Event()
    order = Planner.order

    def watched(self: Planner, rows: pa.Table) -> OrderedRows:
        if len(sizes) == 1:
            # only if prompts of the first bucket run meanwhile
            assert first_is_asked.wait(WAIT_S)
        found = order(self, rows)
        sizes.append(rows.num_rows)
        if len(sizes) == 2:
            second_is_ordered.set()
        return found

    class Waiting(FakeEngine):
        def generate(self, prompts: Iterable[Prompt], question: Question) -> Completions:
            for place, prompt in enumerate(prompts):
                first_is_asked.set()
                if place == 99:
                    assert second_is_ordered.wait(WAIT_S)
                yield Completion(prompt.number, "yes")

    monkeypatch.setattr(Planner, "order", watched)
    connection = numbers_table(250)
    runner(connection, Waiting(), bucket_rows=100).answer(NUMBERS_SQL, NUMBERS, "out")
    assert sizes == [100, 100, 50]
    assert len(answered(connection)) == 250


def test_the_first_buckets_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    order = Planner.order

    def watched(self: Planner, rows: pa.Table) -> OrderedRows:
        sizes.append(rows.num_rows)
        return order(self, rows)

    monkeypatch.setattr(Planner, "order", watched)
    runner(numbers_table(3000), FakeEngine(), bucket_rows=1000).estimate(NUMBERS_SQL, NUMBERS)
    assert sizes == [128, 1000, 1000, 872]
    sizes.clear()
    runner(numbers_table(100), FakeEngine(), bucket_rows=1000).estimate(NUMBERS_SQL, NUMBERS)
    assert sizes == [100]


def test_an_error_while_planning_ahead_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    num_ordered = 0
    order = Planner.order

    def failing(self: Planner, rows: pa.Table) -> OrderedRows:
        nonlocal num_ordered
        num_ordered += 1
        if num_ordered == 2:
            raise MemoryError
        return order(self, rows)

    monkeypatch.setattr(Planner, "order", failing)
    connection = numbers_table(250)
    job = runner(connection, FakeEngine(), bucket_rows=100)
    with pytest.raises(MemoryError):
        job.answer(NUMBERS_SQL, NUMBERS, "out")
    monkeypatch.undo()
    job.answer(NUMBERS_SQL, NUMBERS, "out")
    assert len(answered(connection)) == 250


def test_tables_are_planned_and_asked_about_without_duckdb() -> None:
    code = """
import sys
sys.modules["duckdb"] = None  # importing it is an ImportError
import json
import pyarrow as pa
from tests.tables.recording_engine import RecordingEngine
from vllm_relay.tables import Question, ask, plan_prompts
rows = pa.table({"id": ["2", "1", "2", None], "kind": ['"b"', None, '"b"', None]})
question = Question("Which kind?", ("id", "kind"))
planned = list(plan_prompts(rows, question, None, None))
assert sorted(each.row for each in planned) == [0, 1, 2, 3]
answers = ask(rows, question, RecordingEngine())
assert list(map(json.loads, answers["answer"].to_pylist()[:3])) == [
    {"id": 2, "kind": "b"}, {"id": 1, "kind": None}, {"id": 2, "kind": "b"}
]
assert answers["answer"][3].as_py() is None and answers["error"].null_count == 4
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_bucket_is_planned_in_little_memory() -> None:
    rng = random.Random(0)
    reviews = [json.dumps("".join(rng.choices("etaoin shrdlu", k=2000))) for _ in range(2000)]
    rows = pa.table({"id": list(map(str, range(2000))), "review": reviews})
    question = Question("Is it good?", ("id", "review"))
    del reviews

    def planned() -> int:
        return sum(1 for _ in plan_prompts(rows, question, None, BlockCache(16, 1000)))

    planned()  # imports
    tracemalloc.start()
    assert planned() == 2000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * rows.nbytes


@pytest.mark.parametrize("has_tokenizer", [False, True])
def test_tables_are_planned_without_an_engine(has_tokenizer: bool) -> None:
    rows = pa.table(
        {
            "id": [str(i) for i in range(600)],
            "kind": [None if i % 7 == 0 else f'"kind {i % 5}"' for i in range(600)],
        }
    )
    tokenizer = byte_tokenizer() if has_tokenizer else None
    limits = Limits(max_model_len=45, max_answer_tokens=8)
    found = list(plan_prompts(rows, NUMBERS, tokenizer, BlockCache(16, 100), JobOptions(), limits))
    assert sorted(each.row for each in found) == list(range(600))
    for each in found:
        if isinstance(each, RefusedRow):
            assert has_tokenizer and "fewer than 45" in each.error
            continue
        assert isinstance(each, PlannedPrompt)
        assert each.prompt.number == each.row
        kind = rows["kind"][each.row].as_py() or "null"
        lines = each.prompt.message.split("\n\n")[1].splitlines()
        assert {f'"id": {each.row}', f'"kind": {kind}'} <= set(lines)
        assert bool(each.prompt.token_ids) == has_tokenizer
        if tokenizer is not None:
            assert each.prompt.token_ids == tokenizer(each.prompt.message)["input_ids"]
            assert len(each.token_ids) < 45


TEXT_BYTES = 320


class Forgetting(FakeEngine):
    def generate(self, prompts: Iterable[Prompt], question: Question) -> Completions:
        for prompt in prompts:
            yield Completion(prompt.number, "yes", num_output_tokens=1)


def test_a_row_takes_less_than_its_text_beside_it() -> None:
    def peak_bytes(num_rows: int) -> int:
        connection = numbers_table(num_rows)
        connection.execute(f"UPDATE t SET kind = repeat(md5(id::VARCHAR), {TEXT_BYTES // 32})")
        job = runner(connection, Forgetting(cache=BlockCache(16)), bucket_rows=1000)
        tracemalloc.start()
        job.answer(NUMBERS_SQL, NUMBERS, "out")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    peak_bytes(100)  # imports
    # of which Arrow holds the text, which is not traced
    assert peak_bytes(9000) - peak_bytes(3000) < 6000 * TEXT_BYTES

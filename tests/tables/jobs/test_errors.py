# SPDX-License-Identifier: Apache-2.0
"""Rows without an answer have an error; jobs that end early keep what they have."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import duckdb
import pytest

from tests.tables.byte_tokenizer import byte_tokenizer
from tests.tables.fake_engine import FakeEngine, Fields, RefusedPrompt, echo
from tests.tables.jobs.job_cases import NUMBERS, NUMBERS_SQL, answered, numbers_table, runner
from vllm_relay.tables.engines.base import (
    Completion,
    Completions,
    EngineError,
    Prompt,
)
from vllm_relay.tables.jobs.job_plan import JobPlan
from vllm_relay.tables.ordering.cached_tokens import BlockCache
from vllm_relay.tables.outputs import Output
from vllm_relay.tables.question import Question

NUM_ROWS = 10_000
POISONED = frozenset(range(0, NUM_ROWS, 1000))


def refuse_poisoned(fields: Fields) -> str:
    if json.loads(fields["id"]) in POISONED:
        raise RefusedPrompt("the prompt is poisoned")
    return fields["id"]


def test_ten_poisoned_rows_of_ten_thousand_are_ten_error_cells() -> None:
    connection = numbers_table(NUM_ROWS)
    job = runner(connection, FakeEngine(refuse_poisoned, max_running=256))
    job.answer(NUMBERS_SQL, Question("?", ("id", "kind"), Output("int")), "out")
    rows = answered(connection)
    assert len(rows) == NUM_ROWS
    for number, _, answer, error in rows:
        if number in POISONED:
            assert (answer, error) == (None, "the prompt is poisoned")
        else:
            assert (answer, error) == (number, None)
    assert job.report.num_errors == len(POISONED)


def test_errors_are_counted_by_rows_of_the_source() -> None:
    connection = duckdb.connect()
    connection.execute("CREATE TABLE t AS SELECT unnest([1, 1, 1, 2]) AS id")
    engine = FakeEngine(lambda fields: "no number" if fields["id"] == "1" else "2")
    job = runner(connection, engine)
    job.answer("FROM t", Question("?", ("id",), Output("int")), "out")
    assert job.report.num_errors == 3


@pytest.mark.parametrize(
    ("output", "text", "value"),
    [
        (Output("int"), " 9223372036854775807 ", (1 << 63) - 1),
        (Output("int"), "9223372036854775808", None),
        (Output("int"), "1_000", None),
        (Output("int"), "\N{ARABIC-INDIC DIGIT THREE}", None),
        (Output("int"), "7" * 6000, None),
        (Output("float"), "1e3", 1000.0),
        (Output("float"), "nan", None),
        (Output("float"), "1e999", None),
        (Output("bool"), "True", True),
        (Output("bool"), "1", None),
        (Output("json"), '{"a": [1]}', '{"a": [1]}'),
        (Output("json"), "[" * 100_000, None),
        (Output("json"), '{"a": NaN}', None),
        (Output("json"), '"\\ud800"', None),
        (Output("json"), "", None),
        (Output("text", ("yes", "no")), "yes\n", "yes"),
        (Output("text", ("yes", "no")), "Yes", "yes"),
        (Output("text", ("yes", "no")), "Yes, no", None),
        (Output("text"), "half \ud83d", "half \N{REPLACEMENT CHARACTER}"),
        (Output("text"), "\ud83d\ude00", "\N{GRINNING FACE}"),
        (Output("text"), "a\0b", "a\0b"),
    ],
)
def test_answers_become_values_or_errors(output: Output, text: str, value: object) -> None:
    connection = numbers_table(1)
    engine = FakeEngine(lambda fields: text)
    runner(connection, engine).answer(NUMBERS_SQL, Question("?", ("id", "kind"), output), "out")
    ((_, _, answer, error),) = answered(connection)
    assert answer == value
    assert (error is None) == (value is not None)


def test_an_error_says_that_its_answer_was_cut() -> None:
    class Cutting(FakeEngine):
        def generate(self, prompts: Iterable[Prompt], question: Question) -> Completions:
            for prompt in prompts:
                yield Completion(prompt.number, '{"a', is_cut=True)

    connection = numbers_table(1)
    job = runner(connection, Cutting())
    for target in ("asked", "known"):
        job.answer(NUMBERS_SQL, Question("?", ("id", "kind"), Output("json")), target)
        assert "max_tokens" in answered(connection, target)[0][3]


def test_prompts_that_are_too_long_are_errors_and_the_others_run() -> None:
    connection = duckdb.connect()
    connection.execute(
        "CREATE TABLE t AS SELECT i AS id, repeat('a', i::INTEGER) AS kind "
        "FROM range(200) AS numbers(i)"
    )
    tokenizer = byte_tokenizer()
    engine = FakeEngine(tokenizer=tokenizer, max_model_len=150)
    job = runner(connection, engine)
    estimate = job.estimate(NUMBERS_SQL, NUMBERS)
    job.answer(NUMBERS_SQL, NUMBERS, "out")
    for number, kind, answer, error in answered(connection):
        fields = [f'"id": {number}\n', f'"kind": "{kind}"']
        text = f"Which kind?\n\n{''.join(fields)}\nAnswer:"
        num_tokens = len(tokenizer(text)["input_ids"])
        if num_tokens >= 150:
            assert answer is None
            assert f"{num_tokens} tokens" in error
        else:
            assert error is None
    num_errors = job.report.num_errors
    assert 0 < num_errors < 200
    assert estimate.num_refused == num_errors
    assert estimate.num_prompts == 200
    assert len(engine.prompts) == 200 - num_errors


def test_prompts_that_the_cache_cannot_hold_are_errors() -> None:
    connection = numbers_table(3)
    engine = FakeEngine(tokenizer=byte_tokenizer(), cache=BlockCache(16, 2))
    job = runner(connection, engine)
    assert job.estimate(NUMBERS_SQL, NUMBERS).num_refused == 3
    job.answer(NUMBERS_SQL, NUMBERS, "out")
    assert all("fewer than 32" in row[3] for row in answered(connection))


@dataclass
class Interruption:
    """Raised once, before a step of the engine."""

    error: BaseException
    step: int

    def __call__(self, step: int) -> None:
        if step == self.step:
            self.step = -1
            raise self.error


@pytest.mark.parametrize("error", [KeyboardInterrupt, EngineError])
def test_an_engine_that_is_interrupted_keeps_answers(error: type[BaseException]) -> None:
    connection = numbers_table(500)
    engine = FakeEngine(before_step=Interruption(error("the engine is gone"), 20))
    job = runner(connection, engine, bucket_rows=100, max_total_tokens=1_000_000)
    with pytest.raises(error):
        job.answer(NUMBERS_SQL, NUMBERS, "out")
    assert engine.num_aborted == 2 * engine.max_running
    num_answered = 20 * engine.max_running
    engine.prompts.clear()
    job.answer(NUMBERS_SQL, NUMBERS, "out")
    assert len(engine.prompts) == 500 - num_answered
    assert job.report.num_known == num_answered
    assert len(answered(connection)) == 500


def test_planning_that_is_interrupted_aborts_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    connection = numbers_table(500)
    engine = FakeEngine()
    job = runner(connection, engine, bucket_rows=100)
    with monkeypatch.context() as patch:
        steps = JobPlan.steps

        def interrupted(self: JobPlan) -> Iterator[object]:
            yield from islice(steps(self), 230)
            raise KeyboardInterrupt

        patch.setattr(JobPlan, "steps", interrupted)
        with pytest.raises(KeyboardInterrupt):
            job.answer(NUMBERS_SQL, NUMBERS, "out")
    assert engine.num_aborted > 0
    job.answer(NUMBERS_SQL, NUMBERS, "out")
    assert len(answered(connection)) == 500
    assert 0 < job.report.num_known < 230


def test_an_engine_that_forgets_prompts_is_an_error() -> None:
    class Forgetful(FakeEngine):
        def generate(self, prompts: Iterable[Prompt], question: Question) -> Completions:
            return (each for each in super().generate(prompts, question) if each.number != 3)

    connection = numbers_table(10)
    with pytest.raises(EngineError, match="1 prompts without a completion"):
        runner(connection, Forgetful()).answer(NUMBERS_SQL, NUMBERS, "out")


def test_a_runner_may_be_used_in_another_thread(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    connection = numbers_table(10)
    job = runner(connection, FakeEngine(echo), tmp_path / "answers")
    with ThreadPoolExecutor(1) as executor:
        executor.submit(job.answer, NUMBERS_SQL, NUMBERS, "out").result()
    assert len(answered(connection)) == 10

# SPDX-License-Identifier: Apache-2.0
"""What jobs may spend, are expected to spend, and say that they spent."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from tests.tables.byte_tokenizer import byte_tokenizer
from tests.tables.fake_engine import FakeEngine, Fields, RefusedPrompt
from tests.tables.jobs.job_cases import (
    NUMBERS,
    NUMBERS_SQL,
    QueryJobs,
    answered,
    numbers_table,
    runner,
)
from vllm_relay.tables.engines.base import (
    Completions,
    Prompt,
)
from vllm_relay.tables.engines.lazy import LazyEngine
from vllm_relay.tables.jobs.asking import ask
from vllm_relay.tables.jobs.job_plan import JobPlan
from vllm_relay.tables.jobs.options import JobOptions, TokenBudgetError
from vllm_relay.tables.jobs.report import JobReport
from vllm_relay.tables.ordering.cached_tokens import BlockCache, cached_tokens
from vllm_relay.tables.ordering.sequences import TokenSequences
from vllm_relay.tables.outputs import Output
from vllm_relay.tables.question import Question

TOKENIZER = byte_tokenizer()


def spent(job: QueryJobs) -> int:
    return job.report.prompt_tokens + job.report.output_tokens


@pytest.mark.parametrize("num_answer_tokens", [1, 8])
@pytest.mark.parametrize("max_total_tokens", [1, 60, 700, 5000, 5001, 5050])
def test_the_budget_is_never_exceeded_and_used_as_far_as_it_goes(
    tmp_path: Path, max_total_tokens: int, num_answer_tokens: int
) -> None:
    connection = numbers_table(300)
    engine = FakeEngine(tokenizer=TOKENIZER, num_answer_tokens=num_answer_tokens, max_running=64)
    checkpoint = tmp_path / "answers"
    job = runner(connection, engine, checkpoint, max_total_tokens=max_total_tokens)
    with pytest.raises(TokenBudgetError, match="raise max_total_tokens"):
        job.answer(NUMBERS_SQL, NUMBERS, "out")
    assert spent(job) <= max_total_tokens
    longest = max((len(each.token_ids) for each in engine.prompts), default=80)
    assert spent(job) > max_total_tokens - longest - NUMBERS.max_tokens - 5
    # another job of the same budget gets nothing either
    with pytest.raises(TokenBudgetError):
        job.answer(NUMBERS_SQL, NUMBERS, "out")
    assert spent(job) <= max_total_tokens
    job.close()
    num_done = len(engine.prompts)
    resumed = runner(connection, engine, checkpoint, max_total_tokens=10**6)
    resumed.answer(NUMBERS_SQL, NUMBERS, "out")
    assert resumed.report.num_known == num_done
    assert len(engine.prompts) == 300
    assert len(answered(connection)) == 300


def test_a_budget_that_is_just_enough_is_enough() -> None:
    connection = numbers_table(100)
    engine = FakeEngine(tokenizer=TOKENIZER, num_answer_tokens=NUMBERS.max_tokens)
    free = runner(connection, engine)
    free.answer(NUMBERS_SQL, NUMBERS, "free")
    runner(connection, engine, max_total_tokens=spent(free)).answer(NUMBERS_SQL, NUMBERS, "out")
    with pytest.raises(TokenBudgetError):
        runner(connection, engine, max_total_tokens=spent(free) - 1).answer(
            NUMBERS_SQL, NUMBERS, "less"
        )


def test_no_more_is_reserved_than_the_engine_has_for_an_answer() -> None:
    connection = numbers_table(100)
    engine = FakeEngine(tokenizer=TOKENIZER, answer_limit=1)
    job = runner(connection, LazyEngine(lambda: engine))
    assert NUMBERS.max_tokens > 1
    assert job.estimate(NUMBERS_SQL, NUMBERS).output_tokens == 100
    job.answer(NUMBERS_SQL, NUMBERS, "free")
    exact = runner(connection, LazyEngine(lambda: engine), max_total_tokens=spent(job))
    exact.answer(NUMBERS_SQL, NUMBERS, "out")
    assert exact.report.num_errors == 0


def test_a_spent_budget_says_where_the_answers_are(tmp_path: Path) -> None:
    connection = numbers_table(100)
    engine = FakeEngine(tokenizer=TOKENIZER)
    job = runner(connection, engine, max_total_tokens=500)
    with pytest.raises(TokenBudgetError) as raised:
        job.answer(NUMBERS_SQL, NUMBERS, "out")
    message = str(raised.value)
    assert "without a checkpoint" in message and "only as long as this connection" in message
    assert "raise max_total_tokens, and give a checkpoint" in message
    num_asked = len(engine.prompts)
    assert num_asked > 0 and f"{num_asked} of 100 different rows are done" in message
    # as long as the runner they are there
    assert job.estimate(NUMBERS_SQL, NUMBERS).num_known == num_asked
    job = runner(connection, engine, tmp_path / "answers", max_total_tokens=500)
    with pytest.raises(TokenBudgetError, match="answers keeps their answers: raise .* to go on"):
        job.answer(NUMBERS_SQL, NUMBERS, "out")


def test_the_rows_that_were_asked_about_can_be_had() -> None:
    rows = pa.table({"id": [str(number) for number in range(100)]})
    engine = FakeEngine(tokenizer=TOKENIZER)
    with pytest.raises(TokenBudgetError) as raised:
        ask(rows, Question("?", ("id",), max_tokens=8), engine, JobOptions(max_total_tokens=500))
    found = raised.value.answers
    assert found is not None and found.num_rows == 100
    num_asked = len(engine.prompts)
    assert 0 < num_asked < 100
    assert found["answer"].null_count == 100 - num_asked
    error = "not asked: the budget of 500 tokens is spent"
    assert found["error"].to_pylist().count(error) == 100 - num_asked


def test_rows_of_nulls_are_done_when_the_budget_is_spent() -> None:
    rows = pa.table({"id": [None, *(str(number) for number in range(100))]})
    engine = FakeEngine(tokenizer=TOKENIZER)
    with pytest.raises(TokenBudgetError) as raised:
        ask(rows, Question("?", ("id",), max_tokens=8), engine, JobOptions(max_total_tokens=500))
    assert f"{len(engine.prompts) + 1} of 101 different rows are done" in str(raised.value)


def test_refused_rows_cost_nothing() -> None:
    def refuse_all(fields: Fields) -> str:
        raise RefusedPrompt("no")

    connection = numbers_table(300)
    # enough for one prompt at a time
    engine = FakeEngine(refuse_all, tokenizer=TOKENIZER)
    job = runner(connection, engine, max_total_tokens=100)
    job.answer(NUMBERS_SQL, NUMBERS, "out")
    assert spent(job) == 0
    assert job.report.num_errors == 300


def with_twins(num_rows: int) -> duckdb.DuckDBPyConnection:
    connection = numbers_table(num_rows)
    connection.execute("INSERT INTO t SELECT * FROM t WHERE id % 2 = 0")
    return connection


class CachingEngine(FakeEngine):
    """Prompts one after the other, with the tokens that the simulated cache finds."""

    def generate(self, prompts: Iterable[Prompt], question: Question) -> Completions:
        assert self.cache is not None
        asked = list(prompts)
        found = cached_tokens(TokenSequences.from_lists(p.token_ids for p in asked), self.cache)
        for completion, cached in zip(super().generate(asked, question), found, strict=True):
            yield replace(completion, num_cached_tokens=int(cached))


@pytest.mark.parametrize("order", ["auto", "keep", "fixed", "per_row"])
@pytest.mark.parametrize("num_blocks", [None, 12])
def test_an_estimate_says_what_the_run_takes(order: str, num_blocks: int | None) -> None:
    connection = with_twins(300)
    engine = CachingEngine(
        tokenizer=TOKENIZER, cache=BlockCache(16, num_blocks), num_answer_tokens=8, max_running=1
    )
    job = runner(connection, engine, order=order, bucket_rows=100)
    estimate = job.estimate(NUMBERS_SQL, NUMBERS)
    assert not engine.prompts
    assert job.report.num_rows == 0
    job.answer(NUMBERS_SQL, NUMBERS, "out")
    report = job.report
    assert estimate.num_rows == report.num_rows == 450
    assert estimate.num_prompts == report.num_prompts == 300
    assert estimate.prompt_tokens == report.prompt_tokens
    assert estimate.cached_tokens == report.cached_tokens > 0
    assert estimate.output_tokens == report.output_tokens == 300 * 8
    assert estimate.tokens_are_exact
    again = job.estimate(NUMBERS_SQL, NUMBERS)
    assert (again.num_known, again.prompt_tokens, again.seconds) == (300, 0, 0.0)


def test_an_estimate_without_a_tokenizer_asks_nothing_and_says_that_it_is_one() -> None:
    engine = FakeEngine()
    estimate = runner(numbers_table(20), engine).estimate(NUMBERS_SQL, NUMBERS)
    assert not engine.prompts
    assert not estimate.tokens_are_exact
    assert (estimate.cached_tokens, estimate.seconds) == (None, None)
    assert estimate.prompt_tokens > 0


def test_expected_answers_are_as_long_as_the_output() -> None:
    job = runner(numbers_table(10), FakeEngine(tokenizer=TOKENIZER))
    question = replace(NUMBERS, max_tokens=100)
    assert job.estimate(NUMBERS_SQL, question).output_tokens == 1000
    chosen = replace(question, output=Output("text", ("ab", "abcd")))
    assert job.estimate(NUMBERS_SQL, chosen).output_tokens == 10 * (3 + 1)


def test_the_report_counts_saved_tokens_of_equal_and_known_rows() -> None:
    connection = with_twins(100)
    engine = FakeEngine(tokenizer=TOKENIZER, num_answer_tokens=3)
    job = runner(connection, engine)
    job.answer(NUMBERS_SQL, NUMBERS, "first")
    tokens = {each.number: len(each.token_ids) + 3 for each in engine.prompts}
    even = sum(count for number, count in tokens.items() if number % 2 == 0)
    assert job.report.saved_tokens == even
    assert spent(job) == sum(tokens.values())
    job.answer(NUMBERS_SQL, NUMBERS, "second")
    assert job.report.saved_tokens == 2 * even + sum(tokens.values())
    assert spent(job) == sum(tokens.values())
    assert (job.report.num_known, job.report.num_prompts) == (100, 200)


@pytest.mark.parametrize("bucket_rows", [1, 1000])
def test_tokens_of_rows_that_rules_make_equal_are_saved_in_all_buckets(bucket_rows: int) -> None:
    rows = pa.table({"id": ['"A"', '"b"', '"a"', '"c"', '"B"']})
    engine = FakeEngine(tokenizer=TOKENIZER, num_answer_tokens=3, max_running=1)
    report = JobReport()
    options = JobOptions("keep", ("casefold",), bucket_rows=bucket_rows)
    ask(rows, Question("?", ("id",)), engine, options, report)
    assert len(engine.prompts) == 3 and report.num_by_rules == 2
    assert report.saved_tokens == 2 * (len(engine.prompts[0].token_ids) + 3)


def test_waiting_is_no_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that only sleeping and planning move."""
    now_s = 0.0

    def clock() -> float:
        return now_s

    def pass_time(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    monkeypatch.setattr(time, "perf_counter", clock)
    steps = JobPlan.steps

    def slow_steps(self: JobPlan) -> Iterator[object]:
        for step in steps(self):
            pass_time(0.5)
            yield step

    monkeypatch.setattr(JobPlan, "steps", slow_steps)
    engine = FakeEngine(before_step=lambda step: pass_time(10.0))
    job = runner(numbers_table(40), engine)
    job.answer(NUMBERS_SQL, NUMBERS, "out")
    assert job.report.planning_seconds == pytest.approx(40 * 0.5)
    assert job.report.seconds == pytest.approx(40 * 0.5 + engine.num_steps * 10)


def test_buckets_keep_beginnings_together() -> None:
    connection = duckdb.connect()
    connection.execute(
        "CREATE TABLE t AS SELECT i AS id, md5((i * 7919 % 200)::VARCHAR) AS kind "
        "FROM range(4000) AS numbers(i)"
    )
    engine = FakeEngine(tokenizer=TOKENIZER, cache=BlockCache(16, 1000))
    found = {
        bucket_rows: runner(connection, engine, bucket_rows=bucket_rows).estimate(
            NUMBERS_SQL, NUMBERS
        )
        for bucket_rows in (10_000, 400, 37)
    }
    rates = {rows: (e.cached_tokens or 0) / e.prompt_tokens for rows, e in found.items()}
    kept = runner(connection, engine, order="keep").estimate(NUMBERS_SQL, NUMBERS)
    assert rates[10_000] > (kept.cached_tokens or 0) / kept.prompt_tokens + 0.2
    assert rates[400] == pytest.approx(rates[10_000], abs=0.01)
    assert rates[37] == pytest.approx(rates[10_000], abs=0.02)
    assert np.isfinite(list(rates.values())).all()

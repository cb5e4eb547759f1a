# SPDX-License-Identifier: Apache-2.0
"""Jobs of tasks: others run meanwhile, and cancelling a task stops its job."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pytest

from tests.support.waiting import WAIT_S
from tests.tables.recording_engine import RecordingEngine
from vllm_relay.tables import JobOptions, connect, llm_map_async
from vllm_relay.tables.engines.base import Completions, Prompt
from vllm_relay.tables.engines.lazy import JobStoppedError, StoppableEngine
from vllm_relay.tables.question import Question

NUM_ROWS = 60
TABLE = pa.table({"id": list(range(NUM_ROWS))})
QUESTION = "What is {id}?"
SQL = f"SELECT id, llm('{QUESTION}') AS answer FROM t ORDER BY id"


class HeldEngine(RecordingEngine):
    """Answers so many prompts, and the others when it may."""

    def __init__(self, num_answered: int) -> None:
        super().__init__(lambda row: f"number {row['id']}")
        self.is_held, self.may_go_on = threading.Event(), threading.Event()
        self.num_running = 0
        self._num_answered = num_answered

    def generate(self, prompts: Iterable[Prompt], question: Question) -> Completions:
        self.num_running += 1
        try:
            for completion in super().generate(prompts, question):
                if len(self.messages) > self._num_answered:
                    self.is_held.set()
                    assert self.may_go_on.wait(WAIT_S)
                yield completion
        finally:
            self.num_running -= 1


async def held(engine: HeldEngine) -> None:
    while not engine.is_held.is_set():
        # the loop is free while the job runs
        await asyncio.sleep(0.001)


def test_other_tasks_run_while_a_table_is_asked_about() -> None:
    async def run() -> list[str]:
        engine = HeldEngine(3)
        task = asyncio.create_task(
            llm_map_async(TABLE, QUESTION, engine=engine, show_progress=False)
        )
        await held(engine)
        engine.may_go_on.set()
        return (await task).values.to_pylist()

    assert asyncio.run(run()) == [f"number {i}" for i in range(NUM_ROWS)]


@pytest.mark.parametrize("method", ["generate", "generate_scored"])
def test_a_job_ends_when_it_is_stopped(method: str) -> None:
    engine = RecordingEngine()
    stoppable = StoppableEngine(lambda: engine)
    prompts = [Prompt(number, f'q\n\n"id": {number}\nAnswer:', []) for number in range(9)]
    question = Question("q", ("id",))
    completions = getattr(stoppable, method)(iter(prompts), question)
    assert next(completions).number == 0
    stoppable.stop()
    with pytest.raises(JobStoppedError):
        list(completions)
    assert len(engine.messages) == 1
    stoppable.resume()
    assert len(list(getattr(stoppable, method)(iter(prompts), question))) == 9


def test_errors_arrive() -> None:
    with pytest.raises(ValueError, match="'page' given, which is no column"):
        asyncio.run(llm_map_async(TABLE, "What?", ["page"], engine=RecordingEngine()))


def test_a_cancelled_task_keeps_the_answers_that_came(tmp_path: Path) -> None:
    options = {"checkpoint": tmp_path / "answers", "show_progress": False}

    async def cancelled(engine: HeldEngine) -> None:
        task = asyncio.create_task(llm_map_async(TABLE, QUESTION, engine=engine, **options))
        await held(engine)
        task.cancel()
        await asyncio.sleep(0.01)
        assert not task.done()  # the job runs
        engine.may_go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        # it does not any more
        assert engine.num_running == 0

    engine = HeldEngine(10)
    asyncio.run(cancelled(engine))
    assert len(engine.messages) == 11
    again = RecordingEngine(lambda row: f"number {row['id']}")
    found = asyncio.run(llm_map_async(TABLE, QUESTION, engine=again, **options))
    assert found.values.to_pylist() == [f"number {i}" for i in range(NUM_ROWS)]
    assert len(again.messages) == NUM_ROWS - 11
    assert again.num_closed == 0


def test_a_cancelled_query_leaves_a_connection_that_goes_on(tmp_path: Path) -> None:
    engine = HeldEngine(10)
    options = JobOptions(checkpoint=tmp_path / "answers", show_progress=False)

    async def run() -> list[tuple[object, ...]]:
        with connect(engine=engine, options=options, tables={"t": TABLE}) as database:
            task = asyncio.create_task(database.sql_async(SQL))
            await held(engine)
            task.cancel()
            await asyncio.sleep(0.01)
            engine.may_go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert engine.num_running == 0 and 0 < len(engine.messages) < NUM_ROWS
            result = await database.sql_async(SQL)
            assert result is not None
            rows = result.fetchall()
            # a query of no task
            again = database.sql(SQL)
            assert again is not None and again.fetchall() == rows
            return rows

    assert asyncio.run(run()) == [(i, f"number {i}") for i in range(NUM_ROWS)]
    assert len(engine.messages) == NUM_ROWS

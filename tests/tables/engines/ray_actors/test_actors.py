# SPDX-License-Identifier: Apache-2.0
"""Engines in processes that Ray runs: what becomes of prompts when these fail."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
import ray

from tests.support.one_ray import one_ray
from tests.support.waiting import wait_for
from tests.tables.engines.ray_actors.driver_main import NUM_ANSWERS
from tests.tables.engines.ray_actors.fake_replica import (
    ROWS,
    FailsAt,
    WaitsFor,
    logs,
    open_logged,
    open_unlike,
)
from tests.tables.fake_engine import FakeEngine
from vllm_relay.tables import Output, Question, llm_map
from vllm_relay.tables.engines.base import EngineError, Prompt
from vllm_relay.tables.engines.ray_actors import starting
from vllm_relay.tables.engines.ray_actors.replica import share_of_cores
from vllm_relay.tables.engines.ray_actors.starting import start_actors
from vllm_relay.tables.engines.replicas import ReplicaEngine

pytestmark = pytest.mark.long

QUESTION = Question("Which {text}?", ("text",))


@pytest.fixture(scope="module", autouse=True)
def machine() -> Iterator[None]:
    os.environ.pop("VLLM_CPU_OMP_THREADS_BIND", None)  # inherited by actors
    options: Any = {"include_dashboard": False, "object_store_memory": 100 << 20}
    with one_ray():
        ray.init("local", num_cpus=2, log_to_driver=False, **options)
        yield
        ray.shutdown()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    opened: list[ReplicaEngine] = []

    def start(num_replicas: int = 2, **options: Any) -> ReplicaEngine:
        opened.append(start_actors(partial(open_logged, tmp_path, **options), num_replicas))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def ask(engine: Any, rows: pa.Table = ROWS, **options: Any) -> Any:
    return llm_map(rows, "Which {text}?", engine=engine, show_progress=False, **options)


def expected(rows: pa.Table = ROWS) -> list[Any]:
    return ask(FakeEngine(), rows).values.to_pylist()


def check(result: Any, rows: pa.Table = ROWS) -> None:
    assert result.errors == {}
    assert result.values.to_pylist() == expected(rows)
    assert result.report.num_prompts == len(rows)
    assert result.report.output_tokens == len(rows), "an answer was counted twice, or not"


def test_actors_answer_as_one_engine_does(start: Any, tmp_path: Path) -> None:
    engine = start(2, before_step=WaitsFor(tmp_path, "*.taken", 2))
    check(ask(engine))
    taken = logs(tmp_path, "taken")
    assert len(taken) == 2
    assert Counter(number for each in taken.values() for number in each) == Counter(range(200))
    # they are there for the next question
    check(ask(engine))
    cores = [core for each in logs(tmp_path, "cores").values() for core in each]
    there = sorted(os.sched_getaffinity(0))
    assert sorted(cores) == (there if len(there) > 1 else [])


def prompts(count: int) -> Iterator[Prompt]:
    for number in range(count):
        yield Prompt(number, f'Which?\n\n"text": "{number}"\nAnswer:', [number])


def test_few_prompts_are_taken_ahead_of_time(start: Any) -> None:
    [engine] = start(1, max_running=8, step_s=0.001).engines
    taken = 0

    def counted() -> Iterator[Prompt]:
        nonlocal taken
        for prompt in prompts(100):
            taken += 1
            yield prompt

    lock = threading.Lock()  # cannot be sent to another process
    checked = replace(Output.of("STRUCT(n INTEGER)"), check=lambda _: str(lock))
    num_answered = 0
    for _ in engine.generate(counted(), replace(QUESTION, output=checked)):
        num_answered += 1
        assert taken - num_answered < 8 + 2
    assert num_answered == 100


def test_what_is_not_wanted_any_more_is_aborted(start: Any, tmp_path: Path) -> None:
    held = WaitsFor(tmp_path, "go", step=2)
    [engine] = start(1, max_running=2, num_answer_tokens=2, before_step=held).engines
    completions = engine.generate(prompts(50), QUESTION)
    next(completions)
    completions.close()
    ray.get(engine._actor.end.remote(0))  # it has come there when this one has
    (tmp_path / "go").touch()
    [aborted] = wait_for(lambda: [each for each in logs(tmp_path, "aborted").values() if each])
    assert aborted[-1] >= 1
    # the next question has the engine for itself
    assert len(list(engine.generate(prompts(3), QUESTION))) == 3


def test_an_engine_that_fails_is_lost_and_the_others_go_on(
    start: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failure = FailsAt(tmp_path, 3, EngineError("the device is gone"))
    check(ask(start(2, before_step=failure, step_s=0.005)))
    [message] = caplog.messages
    assert "is gone (the device is gone); the other 1 are asked" in message


def test_a_defect_of_a_replica_is_no_defect_here(start: Any, tmp_path: Path) -> None:
    failure = FailsAt(tmp_path, 3, ZeroDivisionError("by zero"))
    check(ask(start(2, before_step=failure, step_s=0.005)))


def test_a_question_that_is_refused_ends_the_job(start: Any, tmp_path: Path) -> None:
    engine = start(2, before_step=FailsAt(tmp_path, 0, ValueError("no such parameter")))
    with pytest.raises(ValueError, match="^no such parameter$"):
        ask(engine)


def test_when_all_fail_the_job_ends(start: Any) -> None:
    engine = start(2, before_step=partial(fail, EngineError("off")))
    with pytest.raises(EngineError, match="no replica is left; the last one, replica [01]: off"):
        ask(engine)


def fail(error: Exception, step: int) -> None:
    raise error


def one_that_waits(folder: Path) -> int:
    """Of `WaitsFor`, a process: it has prompts that it has not answered."""
    return next(iter(wait_for(lambda: logs(folder, "waits"))))


def test_a_killed_process_loses_nothing(
    start: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(3, max_running=4, before_step=WaitsFor(tmp_path, "go", step=2))

    def kill() -> None:
        os.kill(one_that_waits(tmp_path), signal.SIGKILL)
        (tmp_path / "go").touch()

    killer = threading.Thread(target=kill)
    killer.start()
    check(ask(engine))
    killer.join()
    assert any("is gone" in message for message in caplog.messages)
    # what is left answers the next question too
    check(ask(engine))


def test_a_process_that_stands_still_is_worked_around(start: Any, tmp_path: Path) -> None:
    engine = start(2, max_running=4, before_step=WaitsFor(tmp_path, "go", step=2))
    stopped: list[int] = []

    def stop() -> None:
        stopped.append(one_that_waits(tmp_path))
        os.kill(stopped[0], signal.SIGSTOP)
        (tmp_path / "go").touch()
        # the other one is given all that waits; what was taken comes when it goes on
        wait_for(lambda: sum(map(len, logs(tmp_path, "taken").values())) >= len(ROWS) - 5)
        os.kill(stopped[0], signal.SIGCONT)

    stopper = threading.Thread(target=stop)
    stopper.start()
    check(ask(engine))
    stopper.join()
    taken = logs(tmp_path, "taken")
    assert len(taken[stopped[0]]) < len(ROWS) / 2
    assert sum(map(len, taken.values())) == len(ROWS), "nothing is asked twice"


def test_one_that_stands_still_for_too_long_is_lost(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(starting, "REPLY_TIMEOUT_S", 8.0)
    engine = start(2, max_running=4, before_step=WaitsFor(tmp_path, "go", step=2))

    stopped: list[int] = []

    def stop() -> None:
        stopped.append(one_that_waits(tmp_path))
        os.kill(stopped[0], signal.SIGSTOP)
        (tmp_path / "go").touch()

    stopper = threading.Thread(target=stop)
    stopper.start()
    check(ask(engine))
    stopper.join()
    assert any("has not replied for 8 s" in message for message in caplog.messages)
    os.kill(stopped[0], signal.SIGCONT)  # to close it takes no time then


def test_a_job_goes_on_where_it_was(start: Any, tmp_path: Path) -> None:
    checkpoint = tmp_path / "job.db"
    failure = FailsAt(tmp_path, 5, EngineError("off"))
    with pytest.raises(EngineError, match="off"):
        ask(start(1, before_step=failure), checkpoint=checkpoint)
    result = ask(start(2), checkpoint=checkpoint)
    assert result.values.to_pylist() == expected()
    # each of the five steps before had one at least
    assert 5 <= result.report.num_known < len(ROWS)


def test_a_killed_driver_leaves_no_process_and_its_job_goes_on(start: Any, tmp_path: Path) -> None:
    checkpoint = tmp_path / "job.db"
    command = [sys.executable, "-m", "tests.tables.engines.ray_actors.driver_main"]
    driver = subprocess.Popen([*command, str(tmp_path), str(checkpoint)])
    wait_for(lambda: num_known(checkpoint) > 40 or driver.poll() is not None)
    driver.kill()
    assert driver.wait() == -signal.SIGKILL
    pids = list(logs(tmp_path, "taken"))
    for pid in pids:
        wait_for(lambda pid=pid: not is_running(pid))
    result = ask(start(2), checkpoint=checkpoint)
    assert result.values.to_pylist() == expected()
    assert 40 < result.report.num_known <= 2 * NUM_ANSWERS


def num_known(checkpoint: Path) -> int:
    file = f"file:{checkpoint}?mode=ro"
    with suppress(sqlite3.OperationalError), closing(sqlite3.connect(file, uri=True)) as answers:
        return answers.execute("SELECT count(*) FROM answers").fetchone()[0]
    return 0


def is_running(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def test_replicas_of_different_versions_are_refused(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting, "installed_versions", lambda: {"vllm": "0.1", "vllm-relay": "2"})
    refusal = "different versions given .this process: vllm 0.1, vllm-relay 2; replica 0: vllm "
    with pytest.raises(ValueError, match=refusal):
        start(1)


def test_replicas_that_are_not_alike_are_refused_and_ended(tmp_path: Path) -> None:
    refusal = "different longest prompts given .replica 0: [0-9]+, replica 1: [0-9]+"
    with pytest.raises(ValueError, match=refusal):
        start_actors(partial(open_unlike, tmp_path), 2)
    opened = logs(tmp_path, "opened")
    assert len(opened) == 2
    for pid in opened:
        wait_for(lambda pid=pid: not is_running(pid))


def test_an_engine_that_does_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="TypeError: .*no_such_option"):
        start_actors(partial(open_logged, tmp_path, no_such_option=1), 2)


def test_closing_ends_engines_and_processes(start: Any, tmp_path: Path) -> None:
    engine = start(2)
    ask(engine)
    pids = list(logs(tmp_path, "taken"))
    engine.close()
    engine.close()
    assert set(logs(tmp_path, "closed")) >= set(pids)
    for pid in pids:
        wait_for(lambda pid=pid: not is_running(pid))
    assert ray.is_initialized(), "it was there before"
    with pytest.raises(EngineError, match="no replica is left"):
        ask(engine)


@pytest.mark.parametrize(
    ("num_cores", "count", "expected"),
    [
        (8, 2, ["0,1,2,3", "4,5,6,7"]),
        (7, 3, ["0,1", "2,3", "4,5,6"]),
        (2, 3, [None, None, None]),
        (4, 1, [None]),
    ],
)
def test_replicas_of_a_machine_share_its_cores(
    num_cores: int, count: int, expected: list[str | None]
) -> None:
    found = [share_of_cores(range(num_cores), number, count) for number in range(count)]
    assert found == expected


@pytest.mark.parametrize(
    ("gpus", "num_replicas", "each", "expected"),
    [([0, 0], 9, 2, 0), ([8], 4, 2, 2), ([3, 3], 2, 2, 2), ([1], 1, 1, 1)],
)
def test_gpus_of_a_replica(
    gpus: list[int], num_replicas: int, each: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [{"Alive": True, "Resources": {"GPU": float(count)} if count else {}} for count in gpus]
    nodes.append({"Alive": False, "Resources": {"GPU": 64.0}})
    monkeypatch.setattr(starting.ray, "nodes", lambda: nodes)
    assert starting.checked_gpus(num_replicas, each, is_cluster=False) == expected
    if expected:
        # those of one replica are on one machine
        refusal = f"{num_replicas + 1} replicas with {each} GPUs each given, and Ray has GPUs for"
        with pytest.raises(ValueError, match=refusal):
            starting.checked_gpus(num_replicas + 1, each, is_cluster=False)
        assert starting.checked_gpus(num_replicas + 1, each, is_cluster=True) == each

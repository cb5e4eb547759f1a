# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from vllm_relay.demo.engine_process import EngineError, EngineProcess, in_turn, running_engines

ECHO = "tests.demo.echo_main"


def test_the_one_that_begins_changes_with_every_round() -> None:
    assert [in_turn("ab", number) for number in range(3)] == [["a", "b"], ["b", "a"], ["a", "b"]]


def test_an_engine_is_stopped_if_the_next_one_cannot_be_made() -> None:
    stopped: list[str] = []

    def engines() -> Iterator[Any]:
        first = ExitStack()
        first.callback(stopped.append, "first")
        yield first
        raise OSError("too many files")

    with pytest.raises(OSError, match="too many files"), running_engines(engines()):
        pass
    assert stopped == ["first"]


def test_orders_are_answered_one_after_the_other(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with EngineProcess("echo", ECHO, "settings", log) as engine:
        assert engine.wait() is None
        for number in range(3):
            engine.order("question", number)
        assert [engine.wait() for _ in range(3)] == [("settings", "question", n) for n in range(3)]
    assert "the engine is shut down" in log.read_text()


def test_a_failure_is_told_with_the_end_of_the_log(tmp_path: Path) -> None:
    with (
        pytest.raises(EngineError, match="the echo engine failed: ValueError: no such model"),
        EngineProcess("echo", ECHO, "broken", tmp_path / "log") as engine,
    ):
        engine.wait()
    with EngineProcess("echo", ECHO, "settings", tmp_path / "log") as engine:
        engine.wait()
        engine.order("fail")
        with pytest.raises(EngineError, match="(?s)cannot be answered.*Traceback"):
            engine.wait()
        with pytest.raises(EngineError, match="its process ended with status 0"):
            engine.wait()

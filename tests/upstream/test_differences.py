# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support import vllm_processes
from tests.upstream.differences import contradictions

PASSED = {"a": "passed", "b[1]": "passed", "b[2]": "passed"}


def test_nothing_contradicts_equal_outcomes() -> None:
    assert contradictions(PASSED, PASSED, {}) == []


def test_a_failure_with_a_reason_is_as_it_should_be() -> None:
    assert contradictions(PASSED, PASSED | {"b[1]": "failed"}, {"b[1]": "why"}) == []


@pytest.mark.parametrize(
    ("stock", "relay", "different", "expected"),
    [
        ({}, {"b[1]": "failed"}, {}, "b[1]: fails with relay's schedulers"),
        ({}, {"b[1]": "failed"}, {"b[2]": "why"}, "b[1]: fails with relay's schedulers"),
        ({}, {}, {"b[1]": "why"}, "b[1]: does not fail with relay's schedulers"),
        ({}, {"b[1]": "skipped"}, {"b[1]": "why"}, "b[1]: does not fail with relay's schedulers"),
        ({}, {}, {"gone": "why"}, "gone: does not fail with relay's schedulers"),
        ({"a": "failed"}, {"a": "failed"}, {}, "a: fails with vLLM's own schedulers"),
        ({"a": "failed"}, {}, {}, "a: fails with vLLM's own schedulers"),
        ({}, {"a": "skipped"}, {}, "a: passed with vLLM's schedulers, skipped with relay's"),
        ({"c": "passed"}, {}, {}, "c: was run with vLLM's schedulers only"),
        ({}, {"c": "passed"}, {}, "c: was run with relay's schedulers only"),
    ],
)
def test_what_differs_without_a_reason_is_told(
    stock: dict[str, str], relay: dict[str, str], different: dict[str, str], expected: str
) -> None:
    found = contradictions(PASSED | stock, PASSED | relay, different)
    assert any(each.startswith(expected) for each in found), found


TESTS_OF_VLLM = """
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

def test_sync():
    assert Scheduler.__name__ == "Scheduler"

def test_async():
    assert AsyncScheduler.__name__ == "AsyncScheduler"

def test_without_a_model():
    raise AssertionError
"""


def run_plugin(folder: Path, left_out: list[str], *options: str) -> tuple[int, dict[str, str]]:
    test, outcomes, names = (
        folder / name for name in ("test_stock.py", "outcomes.json", "left_out.json")
    )
    test.write_text(TESTS_OF_VLLM)
    names.write_text(json.dumps(left_out))
    command = ["-q", "-c", os.devnull, "--rootdir", str(folder), "-p", "no:cacheprovider"]
    command += ["-p", "tests.upstream.relay_schedulers", "--outcomes", str(outcomes)]
    command += ["--left-out", str(names), *options, str(test)]
    done = vllm_processes.run_module("pytest", command, {})
    return done.returncode, json.loads(outcomes.read_text())


@pytest.mark.integration
def test_the_plug_in_puts_relays_schedulers_in_the_place_of_vllms(tmp_path: Path) -> None:
    left_out = ["test_stock.py::test_without_a_model"]
    sync, asynchronous = "test_stock.py::test_sync", "test_stock.py::test_async"
    assert run_plugin(tmp_path, left_out) == (0, {sync: "passed", asynchronous: "passed"})
    relay = run_plugin(tmp_path, left_out, "--relay-schedulers")
    assert relay == (1, {sync: "failed", asynchronous: "failed"})


@pytest.mark.integration
def test_what_is_left_out_has_to_be_there(tmp_path: Path) -> None:
    status, outcomes = run_plugin(tmp_path, ["test_stock.py::test_gone"])
    assert (status, outcomes) == (4, {})

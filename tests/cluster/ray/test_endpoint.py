# SPDX-License-Identifier: Apache-2.0
"""One endpoint over processes that Ray Serve runs, without a model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import serve

from tests.cluster.ray.endpoints import connected
from tests.cluster.ray.fake_app import FakeReplica
from tests.support.one_ray import one_ray
from tests.support.ports import free_port
from tests.support.waiting import wait_for
from vllm_relay.cluster.ray.endpoint import one_endpoint

PREFIXES = [f"prefix {number} " * 100 for number in range(8)]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    options: Any = {"include_dashboard": False, "object_store_memory": 100 << 20}
    with one_ray():
        ray.init("local", num_cpus=2, log_to_driver=False, **options)
        try:
            port = free_port()
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            no_cpu = {"num_cpus": 0}
            serve.run(one_endpoint(FakeReplica, num_replicas=2, ray_actor_options=no_cpu))
            both_work(port)
            yield port
        finally:
            serve.shutdown()
            ray.shutdown()


def ask(port: int, prompt: str = "", **more: Any) -> int:
    """The process that answers."""
    answer = connected(port, {"model": "fake", "prompt": prompt, **more})
    assert answer.status == 200, answer.read()
    return json.loads(answer.read())["process"]


def both_work(port: int) -> None:
    """Waits until the endpoint knows of two replicas: equal ones take turns."""
    wait_for(lambda: len({ask(port, str(number)) for number in range(2)}) == 2)


def test_each_prefix_has_one_home_and_all_replicas_work(port: int) -> None:
    homes = [{ask(port, f"{prefix}{n}") for n in range(3)} for prefix in PREFIXES]
    assert [len(each) for each in homes] == [1] * len(PREFIXES)
    assert len(set.union(*homes)) == 2


def test_a_replica_that_works_is_given_less(port: int, tmp_path: Path) -> None:
    began, until = tmp_path / "began", tmp_path / "until"
    with ThreadPoolExecutor(1) as pool:
        more = {"began": str(began), "until": str(until), "cancelled": "", "max_tokens": 200}
        held = pool.submit(ask, port, "a prompt that is long " * 100, **more)
        try:
            wait_for(began.exists)
            others = {ask(port, f"{number} short", max_tokens=1) for number in range(4)}
        finally:
            until.touch()
        assert len(others) == 1 and held.result() not in others


def test_answers_stream(port: int, tmp_path: Path) -> None:
    until = tmp_path / "until"
    more = {"stream": True, "until": str(until), "cancelled": ""}
    try:
        answer = connected(port, {"model": "fake", "prompt": "x", **more})
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.readline().startswith(b'data: {"process"')
    finally:
        until.touch()
    assert answer.read().strip() == b"data: [DONE]"


def test_what_a_replica_says_comes_back(port: int) -> None:
    answer = connected(port, {"model": "fake"}, "/v1/completions?a=b%20c")
    assert answer.headers["x-query"] == "a=b%20c"
    assert answer.headers["x-given"] == "kept"
    refused = connected(port, b"{no JSON")
    assert (refused.status, json.loads(refused.read())["error"]["message"]) == (400, "no JSON")
    refused = connected(port, {"model": "other"})
    assert (refused.status, json.loads(refused.read())["error"]["code"]) == (404, 404)
    assert connected(port, {}, "/v1/nothing").status == 404


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/relay/pins", "/v1/load_lora_adapter"])
def test_routes_of_one_replica_are_refused(port: int, path: str) -> None:
    refused = connected(port, {}, path)
    assert refused.status == 404
    assert path in json.loads(refused.read())["error"]["message"]


def test_who_leaves_is_waited_for_no_longer(port: int, tmp_path: Path) -> None:
    cancelled, until = tmp_path / "cancelled", tmp_path / "until"
    more = {"stream": True, "until": str(until), "cancelled": str(cancelled)}
    answer = connected(port, {"model": "fake", **more})
    try:
        answer.readline()
        answer.close()
        wait_for(cancelled.exists)
    finally:
        until.touch()


def test_a_replica_that_dies_is_left(port: int, tmp_path: Path) -> None:
    dies = str(tmp_path / "dies")
    process = ask(port, PREFIXES[0], dies=dies)
    assert Path(dies).exists()
    assert ask(port, PREFIXES[0]) == process


def test_a_stream_whose_replica_dies_ends_with_an_error(port: int, tmp_path: Path) -> None:
    until = tmp_path / "until"
    more = {"stream": True, "until": str(until), "dies": str(tmp_path / "dies")}
    try:
        answer = connected(port, {"model": "fake", **more})
        assert b"process" in answer.readline()
    finally:
        until.touch()
    error, end = answer.read().strip().split(b"\n\n")
    assert end == b"data: [DONE]"
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == 500

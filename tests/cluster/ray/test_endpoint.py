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

from tests.cluster.ray.endpoints import answer, connected, next_event
from tests.cluster.ray.fake_app import FakeReplica
from tests.cluster.ray.fake_page import DEADLY, KEY, NODE
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


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/relay/schemas", "/v1/load_lora_adapter"])
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


def watched(port: int) -> tuple[Any, dict[str, str]]:
    """A stream of all events, and the sources of both replicas, when all was told."""
    stream = connected(port, b"", "/relay/forest/events?texts=1", "GET", KEY)
    assert stream.headers["content-type"].startswith("text/event-stream")
    sources: dict[str, str] = {}
    shown: set[str] = set()
    while len(shown) < 2:
        kind, data = next_event(stream)
        if kind == "hello":
            assert data["texts"] is True
            sources = {each["id"]: each["name"] for each in data["sources"]}
        else:
            assert (kind, data["nodes"][0]["id"]) == ("snapshot", NODE)
            assert data["source"] in sources
            shown.add(data["source"])
    return stream, sources


def page_of(port: int, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    return answer(port, method, f"/relay/{path}", body, authorization=KEY)


def test_pins_of_all_replicas(port: int) -> None:
    stream, sources = watched(port)
    first, second = (each.removesuffix(":0") for each in sources)

    def pins() -> dict[str, int]:
        """Their ids, and how many look at their replicas."""
        return {pin["id"]: pin["viewers"] for pin in page_of(port, "GET", "pins")[1]["pins"]}

    assert pins() == {f"{first}:system": 1, f"{second}:system": 1}
    asked = {"source": f"{second}:0", "node": NODE, "id": "mine"}
    made = page_of(port, "POST", "pins", asked)
    assert made == (201, {"id": f"{second}:mine", "blocks": 2})
    assert pins().keys() == {f"{first}:system", f"{second}:system", f"{second}:mine"}
    assert page_of(port, "DELETE", f"pins/{first}:mine")[0] == 404
    assert page_of(port, "DELETE", f"pins/{second}:mine") == (204, None)
    for body in ({"text": "a prompt"}, {"source": 1, "node": NODE}, [], b"{"):
        status, refused = page_of(port, "POST", "pins", body)
        assert status == 400 and "source and node" in refused["error"]["message"]
    stream.close()  # then nobody is asked any more
    wait_for(lambda: not any(pins().values()))


@pytest.mark.parametrize("path", ["forest/events", "pins"])
def test_replicas_say_who_may_look(port: int, path: str) -> None:
    status, refused = answer(port, "GET", f"/relay/{path}")
    assert (status, refused["error"]["message"]) == (401, "no key")


def test_the_page_shows_replicas_beside_each_other_until_one_ends(port: int) -> None:
    assert connected(port, b"", "/relay/", "GET").read() == b"the page"
    stream, sources = watched(port)
    first, second = sources
    assert sources[first] == f"replica {first.removesuffix(':0')}"

    assert page_of(port, "POST", "forest/evict", {"source": second, "node": NODE}) == (
        200,
        {"evicted_blocks": 2},
    )
    assert next_event(stream) == ("delta", {"source": second, "removed": [NODE]})

    status, refused = page_of(port, "POST", "forest/evict", {"source": second, "node": DEADLY})
    assert status == 503 and second.removesuffix(":0") in refused["error"]["message"]
    assert next_event(stream) == ("gone", {"source": second})
    kind, hello = next_event(stream)  # of the one that Ray Serve starts in its place
    [third] = {each["id"] for each in hello["sources"]} - {first}
    assert kind == "hello" and third != second
    assert next_event(stream)[1]["source"] == third
    status, refused = page_of(port, "POST", "forest/evict", {"source": second, "node": NODE})
    assert status == 404 and "has ended" in refused["error"]["message"]
    stream.close()


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

# SPDX-License-Identifier: Apache-2.0
"""A machine of a Ray cluster that is lost: what becomes of a job's prompts and of requests."""

from __future__ import annotations

import http.client
import logging
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import serve
from ray._private.state import actors
from ray.cluster_utils import Cluster

from tests.cluster.ray.endpoints import connected
from tests.cluster.ray.fake_app import FakeReplica
from tests.support.one_ray import one_ray
from tests.support.ports import free_port
from tests.support.waiting import wait_for
from tests.tables.engines.ray_actors.fake_replica import WaitsFor, logs, open_logged
from tests.tables.engines.ray_actors.test_actors import ask, check
from vllm_relay.cluster.ray.endpoint import one_endpoint
from vllm_relay.tables.engines.ray_actors.starting import start_actors

pytestmark = pytest.mark.soak

# so that each machine has one replica
ONE_GPU = {"num_cpus": 1, "num_gpus": 1, "object_store_memory": 100 << 20}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    head = {**ONE_GPU, "include_dashboard": False}
    with one_ray():
        found = Cluster(initialize_head=True, head_node_args=head)
        try:
            found.add_node(**ONE_GPU)
            found.wait_for_nodes()
            ray.init(found.address, log_to_driver=False)
            yield found
        finally:
            ray.shutdown()
            found.shutdown()


def lose_machine(cluster: Cluster) -> None:
    """That which is not the head."""
    [other] = cluster.worker_nodes
    cluster.remove_node(other, allow_graceful=False)


def test_a_job_goes_on_with_what_is_left(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    held = WaitsFor(tmp_path, "go", step=3)
    engine = start_actors(partial(open_logged, tmp_path, before_step=held, max_running=4), 2)
    try:
        assert len(machines_of("Replica")) == 2
        with caplog.at_level(logging.WARNING), ThreadPoolExecutor(1) as pool:
            job = pool.submit(ask, engine)
            wait_for(lambda: len(logs(tmp_path, "taken")) == 2)
            lose_machine(cluster)
            wait_for(lambda: any("is gone" in each for each in caplog.messages))
            (tmp_path / "go").touch()
            check(job.result())
    finally:
        engine.close()
    [message] = [each for each in caplog.messages if "is gone" in each]
    assert "the other 1 are asked what it did not answer" in message
    first, second = map(set, logs(tmp_path, "taken").values())
    assert first | second == set(range(200))
    # only what was on its way there is asked twice
    assert len(first & second) <= 4 + 2


def test_an_endpoint_goes_on_with_what_is_left(cluster: Cluster, tmp_path: Path) -> None:
    port = free_port()
    # not of both machines, which are one and have the same ports
    serve.start(http_options={"host": "127.0.0.1", "port": port, "location": "HeadOnly"})
    try:
        options = {"num_cpus": 0, "num_gpus": 1}
        serve.run(one_endpoint(FakeReplica, num_replicas=2, ray_actor_options=options))
        wait_for(lambda: len({process(port, str(number)) for number in range(2)}) == 2)
        head = cluster.head_node.node_id
        [endpoint] = alive("ServeReplica:default:endpoint")
        homes = {each["Pid"]: each["Address"]["NodeID"] for each in alive("ServeReplica")}
        until = tmp_path / "until"
        with ThreadPoolExecutor(4) as pool:
            asked: list[Future[int]] = []
            for number in range(4):
                began = tmp_path / f"began{number}"
                more = {"began": str(began), "until": str(until), "cancelled": str(tmp_path / "c")}
                asked.append(pool.submit(process, port, f"{number} " * 200, **more))
                wait_for(began.exists)
            lose_machine(cluster)
            wait_for(lambda: machines_of("ServeReplica") == {head})
            until.touch()
            for each in asked:
                if endpoint["Address"]["NodeID"] == head:
                    assert homes[each.result()] == head
                else:  # all that went through it is lost with it
                    assert isinstance(each.exception() or 0, (OSError, AssertionError, int))
        wait_for(lambda: is_answered(port))
        assert homes[process(port, "after it")] == head
    finally:
        serve.shutdown()


def alive(name: str) -> list[dict[str, Any]]:
    """Actors whose class has a name that begins so."""
    found = [each for each in actors().values() if each["ActorClassName"].startswith(name)]
    return [each for each in found if each["State"] == "ALIVE"]


def machines_of(name: str) -> set[str]:
    return {each["Address"]["NodeID"] for each in alive(name)}


def process(port: int, prompt: str, **more: Any) -> int:
    """That answers."""
    answer = connected(port, {"model": "fake", "prompt": prompt, **more})
    page = answer.read()
    assert answer.status == 200, page
    return int(page.split(b":")[1].strip(b" }"))


def is_answered(port: int) -> bool:
    try:
        return process(port, "again") > 0
    except (OSError, http.client.HTTPException, AssertionError):
        return False

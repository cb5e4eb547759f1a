# SPDX-License-Identifier: Apache-2.0
"""Requests of the RELAY_SPARSE backend that get better indexes while they run: still right."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform

from tests.attention_backends.sparse_worker import CpuWorker, dtypes
from tests.long_context.made_costs import made_costs
from vllm_relay.long_context import host_sequence, running_indexes, worker
from vllm_relay.sparse.coarse import CoarseIndex
from vllm_relay.sparse.flat import FlatIndex
from vllm_relay.sparse.head_plan import HeadPlan
from vllm_relay.sparse.query_types import Dipr

pytestmark = pytest.mark.skipif(
    not current_platform.is_cpu(), reason="relay's kernels are for CPUs"
)


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> None:
    CpuWorker.begin_process(monkeypatch)


def whole_lists(*args: Any) -> tuple[CoarseIndex, HeadPlan]:
    """Stands for `build_index`: an index that finds every key."""
    _, keys, _, train_queries, *_ = args
    assert train_queries.shape[0] > 0
    index = CoarseIndex().build(keys, threads=1)
    query = Dipr(alpha=1e-37, width=index.num_lists)
    return index, HeadPlan(((keys.shape[0], query),), "", None)


@dtypes
def test_a_running_request_takes_its_index(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And gives it back when there is no memory for it any more."""
    monkeypatch.setattr(host_sequence, "GRANULE_TOKENS", 25)
    monkeypatch.setattr(worker, "load_costs", made_costs)
    monkeypatch.setattr(running_indexes, "build_index", whole_lists)
    run = CpuWorker(dtype, alpha=1e-37)
    long, other = run.sequence("long", 600, 400), run.sequence("other", 600, 400)
    run.step((long, 200), (other, 200), indexed={"long": True})
    run.step((long, 200), (other, 200))
    run.step((long, 1), (other, 1))
    assert run.own(long).segments[0].queries is None
    while run.own(long).better is None and long.num_computed_tokens < 550:
        run.step((long, 1), (other, 1))
        time.sleep(0.01)
    for _ in range(3):
        run.step((long, 1), (other, 1))
    own = run.own(long)
    assert own.segments[0] is own.better and own.better is not None
    assert isinstance(own.better.layer.indexes[0], CoarseIndex)
    assert worker.state.take_stats().index_builds_queued == 0
    # queries are no more collected, and never of requests that nobody asked it of
    num_queries = own.train_queries.sample()
    run.step((long, 1), (other, 1), indexed={"long": False})
    assert own.better is None and own.train_queries.sample() is None and num_queries is not None
    assert run.own(other).train_queries.sample() is None
    for _ in range(5):
        run.step((long, 1), (other, 1))
    assert own.better is None and isinstance(own.segments[0].layer.indexes[0], FlatIndex)


@pytest.mark.parametrize("how", ["ended", "dropped", "begins again"])
def test_an_index_that_is_being_built_for_nobody_is_let_go(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, go_on = threading.Event(), threading.Event()

    def waits(*args: Any) -> Any:
        started.set()
        assert go_on.wait(30)
        return whole_lists(*args)

    monkeypatch.setattr(host_sequence, "GRANULE_TOKENS", 25)
    monkeypatch.setattr(worker, "load_costs", made_costs)
    monkeypatch.setattr(running_indexes, "build_index", waits)
    run = CpuWorker(alpha=1e-37)
    long, other = run.sequence("long", 500, 400), run.sequence("other", 90, 20)
    run.step((long, 200), (other, 20), indexed={"long": True})
    run.step((long, 200), (other, 1))
    for _ in range(3):
        run.step((long, 1), (other, 1))
    own = run.own(long)
    assert started.wait(5) and worker.state.take_stats().index_builds_queued == 1
    run.preempt(long)
    orders: dict[str, Any] = {"dropped": {"dropped": ["long"]}}.get(how, {})
    if how == "ended":
        run.finished = ["long"]
    if how != "begins again":
        run.step((other, 1), **orders)
        assert worker.state.take_stats().index_builds_queued == 0
    if how == "ended":
        assert "long" not in worker.state.requests
    else:
        long.num_computed_tokens = 0
        run.step((other, 1), (long, 100), resumed={"long"})
        assert worker.state.take_stats().index_builds_queued == 0
        assert run.own(long) is not own
    go_on.set()
    assert worker.state._builders is not None
    worker.state._builders.shutdown()
    assert own.better is None

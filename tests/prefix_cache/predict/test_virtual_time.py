# SPDX-License-Identifier: Apache-2.0
"""A server by a clock that its steps move."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.request import Request

from tests.integration.tiny_models import save_model
from vllm_relay.prefix_cache.predict.engine import (
    CacheSize,
    PredictorSettings,
    create_config,
    create_core,
)
from vllm_relay.prefix_cache.predict.step_costs import StepCosts
from vllm_relay.prefix_cache.predict.virtual_time import VirtualServer

STEP_S, TOKEN_S = 0.5, 0.01
OUTPUT_TOKENS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model("llama", tmp_path_factory.mktemp("llama")))


@contextmanager
def a_server(
    model: str, eviction: str | None = None, relay: dict[str, Any] | None = None
) -> Iterator[tuple[VirtualServer, Any]]:
    """And what makes requests; one runs at a time, and 10 blocks of 32 tokens are cached."""
    settings = PredictorSettings(
        model, eviction, 32, max_num_seqs=1, max_model_len=128, dtype="float32", relay=relay or {}
    )
    core = create_core(create_config(settings, online=True), CacheSize(blocks=10))
    scheduler: Any = core.scheduler
    executor: Any = core.model_executor
    executor.sampler = lambda request_id: (
        [] if scheduler.requests[request_id].is_prefill_chunk else [3]
    )
    sampling = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)

    def request(name: str, tokens: list[int]) -> Request:
        return Request(name, tokens, sampling, None, block_hasher=core.request_block_hasher)

    try:
        yield VirtualServer(core, StepCosts(STEP_S, TOKEN_S)), request
    finally:
        core.shutdown()


@pytest.mark.parametrize("eviction", [None, "queue"])
def test_every_step_takes_what_it_costs(model: str, eviction: str | None) -> None:
    finished: list[int] = []
    with a_server(model, eviction) as (server, request):
        requests = [request("a", [5] * 40), request("b", [5] * 33 + [6]), request("c", [7])]
        server.serve(requests, [1.0, 1.1, 50.0], on_progress=finished.append)
        a, b, c = server.courses.values()
        assert list(server.courses) == ["a", "b", "c"]
    prefill_s, decode_s = STEP_S + 40 * TOKEN_S, STEP_S + TOKEN_S
    assert (a.arrived_s, a.admitted_s) == (1.0, 1.0)
    assert a.first_token_s == pytest.approx(1 + prefill_s)
    assert a.finished_s == pytest.approx(1 + prefill_s + 2 * decode_s)
    assert b.admitted_s == a.finished_s
    assert (a.cached_tokens, b.cached_tokens, c.cached_tokens) == (0, 32, 0)
    assert b.first_token_after_s(0) == pytest.approx(
        a.finished_s + STEP_S + 2 * TOKEN_S - b.arrived_s
    )
    # nothing takes time while nobody is there
    assert c.admitted_s == 50.0
    assert server.now_s == pytest.approx(50 + 3 * decode_s)
    assert server.steps == 9
    assert finished == sorted(finished)
    assert finished[-1] == 3


def test_what_is_not_served_in_time_waits_up_to_then(model: str) -> None:
    with a_server(model) as (server, request):
        server.serve([request(name, [7] * 20) for name in "abc"], [0.0, 0.0, 90.0], until_s=1.0)
        a, b = server.courses.values()
        assert (a.admitted_s, a.finished_s, b.admitted_s) == (0.0, None, None)
        assert b.waited_s(server.now_s) == b.first_token_after_s(server.now_s) == server.now_s
        assert 1.0 <= server.now_s < 2.0


def test_relays_bounds_are_of_the_virtual_clock(model: str) -> None:
    """One request of another prefix is overtaken by all that come, until it is late."""
    served_s = OUTPUT_TOKENS * STEP_S

    def wait_s(max_hold_s: float) -> float:
        with a_server(model, "queue", {"max_hold_s": max_hold_s}) as (server, request):
            requests = [request(str(i), [5 + (i == 1)] * 64 + [100 + i]) for i in range(20)]
            arrivals_s = [0.0, *(0.1 + 0.9 * served_s * i for i in range(19))]
            server.serve(requests, arrivals_s)
            return server.courses["1"].waited_s(0)

    assert wait_s(1e6) > 12 * served_s
    assert wait_s(4 * served_s) < 9 * served_s


def test_a_scheduler_that_runs_nothing_is_refused(model: str) -> None:
    with a_server(model) as (server, request):
        scheduler: Any = server._core.scheduler
        scheduler.max_num_scheduled_tokens = 0
        with pytest.raises(ValueError, match="the scheduler runs none of 2 waiting requests"):
            server.serve([request(name, [7] * 20) for name in "ab"], [0.0, 0.0])

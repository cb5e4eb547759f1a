# SPDX-License-Identifier: Apache-2.0
"""Replicas in virtual time, and what `vllm-relay predict --replicas` says of them."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore

from tests.integration.tiny_models import save_model
from vllm_relay.cli import app
from vllm_relay.cluster.rules import ONLINE, offline
from vllm_relay.cluster.simulate import Outcome, simulated_replicas
from vllm_relay.prefix_cache.predict.engine import CacheSize, PredictorSettings
from vllm_relay.prefix_cache.predict.executor import StubExecutor
from vllm_relay.prefix_cache.predict.input import PredictedRequest
from vllm_relay.prefix_cache.predict.load import Load, poisson_s
from vllm_relay.prefix_cache.predict.predictor import Predictor
from vllm_relay.prefix_cache.predict.step_costs import StepCosts

COSTS = StepCosts(8e-3, 1e-4)
SIZE = CacheSize(blocks=60)
PREFIXES, REQUESTS = 6, 60


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> PredictorSettings:
    model = str(save_model("llama", tmp_path_factory.mktemp("llama")))
    return PredictorSettings(
        model, "queue", 32, max_num_seqs=4, max_num_batched_tokens=512, max_model_len=512,
        dtype="float32",
    )  # fmt: skip


@pytest.fixture(scope="module")
def requests() -> list[PredictedRequest]:
    rng = np.random.default_rng(0)
    prefixes = rng.integers(3, 200, (PREFIXES, 256)).tolist()
    return [
        PredictedRequest(n, prefixes[n % PREFIXES] + rng.integers(3, 200, 40).tolist(), 4)
        for n in range(REQUESTS)
    ]


def check_whole(outcome: Outcome, requests: list[PredictedRequest]) -> None:
    assert sum(each.requests for each in outcome.replicas) == len(requests)
    assert all(each.finished_s is not None for each in outcome.courses)
    assert sum(each.prompt_tokens for each in outcome.replicas) == sum(
        len(each.prompt_token_ids) for each in requests
    )
    assert outcome.makespan_s == max(each.finished_s or 0.0 for each in outcome.courses)


def test_one_replica_is_the_predictor(
    settings: PredictorSettings, requests: list[PredictedRequest]
) -> None:
    arrivals_s = poisson_s(20, REQUESTS, 0)
    alone = Predictor(settings, requests).predict(SIZE, load=Load(COSTS, arrivals_s))
    with simulated_replicas(settings, SIZE, 1, COSTS, requests, online=True) as replicas:
        outcome = replicas.serve(ONLINE["relay"](replicas, COSTS), arrivals_s)
    assert outcome.hit_rate == alone.hit_rate
    assert alone.waits is not None
    waits_s = [each.first_token_after_s(0.0) for each in outcome.courses]
    assert waits_s == pytest.approx(alone.waits.first_token_s)


def test_engines_end_and_what_they_share_once(
    settings: PredictorSettings,
    requests: list[PredictedRequest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: Counter[str] = Counter()

    def counted(owner: Any, name: str) -> None:
        shutdown = owner.shutdown
        monkeypatch.setattr(owner, "shutdown", lambda self: ended.update([name]) or shutdown(self))

    counted(EngineCore, "cores")
    counted(StubExecutor, "executors")
    counted(Scheduler, "schedulers")
    finished: list[int] = []
    for _ in range(2):  # those that come later find nothing of the first
        with simulated_replicas(
            settings, SIZE, 3, COSTS, requests, online=False, on_progress=finished.append
        ) as replicas:
            check_whole(replicas.run(offline("relay", replicas, COSTS), 8), requests)
    assert ended == {"cores": 2, "executors": 6, "schedulers": 6}
    assert finished.count(REQUESTS) >= 2 and max(finished) == REQUESTS


def test_requests_that_share_go_together(
    settings: PredictorSettings, requests: list[PredictedRequest]
) -> None:
    hit_rates = {}
    for rule in ONLINE:
        with simulated_replicas(settings, SIZE, 3, COSTS, requests, online=True) as replicas:
            router = ONLINE[rule](replicas, COSTS)
            outcome = replicas.serve(router, poisson_s(60, REQUESTS, 0))
        check_whole(outcome, requests)
        hit_rates[rule] = outcome.hit_rate
    # one after the other, six prefixes meet two replicas each
    assert hit_rates["relay"] > hit_rates["fewest-requests"] + 0.05


@pytest.mark.parametrize("rule", ONLINE)
def test_requests_that_are_all_there(
    settings: PredictorSettings, requests: list[PredictedRequest], rule: str
) -> None:
    with simulated_replicas(settings, SIZE, 3, COSTS, requests, online=False) as replicas:
        outcome = replicas.run(offline(rule, replicas, COSTS), 8)
    check_whole(outcome, requests)
    if rule == "relay":
        # each prefix once, and again where another replica joined
        shared = 256 * (REQUESTS - PREFIXES)
        assert outcome.hit_rate > 0.9 * shared / (REQUESTS * 296)
        assert outcome.imbalance < 1.2


def test_what_is_left_when_no_more_requests_come_is_no_load(
    settings: PredictorSettings, requests: list[PredictedRequest]
) -> None:
    *others, last = requests
    given = [*others, replace(last, output_tokens=200)]
    arrivals_s = poisson_s(30, REQUESTS, 0)
    with simulated_replicas(settings, SIZE, 2, COSTS, given, online=True) as replicas:
        outcome = replicas.serve(ONLINE["round-robin"](replicas, COSTS), arrivals_s)
    [with_long] = [course for course in outcome.courses[-1:] if course.finished_s is not None]
    assert with_long.finished_s == outcome.makespan_s
    tail_s = outcome.makespan_s - arrivals_s[-1]
    busy_s = [each.busy_s for each in outcome.replicas]
    arriving_s = [each.busy_while_arriving_s for each in outcome.replicas]
    # it is the second's, which works on it alone, but for the step in which it arrives
    assert busy_s[1] - arriving_s[1] == pytest.approx(tail_s, abs=2 * COSTS.seconds(512))
    assert max(arriving_s) <= arrivals_s[-1] + COSTS.seconds(512)
    assert outcome.imbalance == pytest.approx(2 * max(busy_s) / sum(busy_s))
    assert outcome.imbalance_while_arriving == pytest.approx(2 * max(arriving_s) / sum(arriving_s))
    assert outcome.imbalance > outcome.imbalance_while_arriving


def test_the_command(tmp_path: Path, requests: list[PredictedRequest]) -> None:
    file, found = tmp_path / "requests.jsonl", tmp_path / "found.json"
    lines = [{"prompt_token_ids": each.prompt_token_ids, "max_tokens": 4} for each in requests]
    file.write_text("\n".join(map(json.dumps, lines)))
    given = ["predict", str(file), "--blocks", "60", "--block-size", "32", "--replicas", "2"]
    run = CliRunner().invoke(app, [*given, "--json", str(found)])
    assert run.exit_code == 0, run.output
    rows = json.loads(found.read_text())["replicas"]
    assert [row["router"] for row in rows] == list(ONLINE)
    assert all(row["router"] in run.output for row in rows)
    slower = {"--step-ms": "80", "--token-us": "350"}  # ten times the defaults
    again = CliRunner().invoke(
        app, [*given, *chain.from_iterable(slower.items()), "--json", str(found)]
    )
    assert again.exit_code == 0, again.output
    for row, slow in zip(rows, json.loads(found.read_text())["replicas"], strict=True):
        assert slow["makespan_s"] == pytest.approx(10 * row["makespan_s"])
    one = CliRunner().invoke(
        app, [*given, "--router", "relay", "--arrivals", "poisson:20", "--scheduler", "relay"]
    )
    assert one.exit_code == 0 and "first token p99 s" in one.output
    assert "round-robin" not in one.output


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--router", "relay"], "give --replicas N too"),
        (["--replicas", "0"], "expected at least 1"),
        (["--replicas", "2", "--router", "best"], "expected one of relay, round-robin"),
        (["--replicas", "2", "--plot", "x.svg"], "has no effect with --replicas"),
    ],
)
def test_options_that_do_not_fit(tmp_path: Path, given: list[str], message: str) -> None:
    (tmp_path / "r.jsonl").write_text('{"prompt_token_ids": [1, 2]}')
    run = CliRunner().invoke(app, ["predict", str(tmp_path / "r.jsonl"), "--blocks", "9", *given])
    assert run.exit_code != 0
    assert message in " ".join(run.output.replace("│", " ").split())

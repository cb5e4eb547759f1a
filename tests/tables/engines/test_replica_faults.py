# SPDX-License-Identifier: Apache-2.0
"""Whatever fails, a prompt is answered once, as long as one replica is left."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from ray import exceptions

from tests.support.depth import cases
from tests.support.waiting import WAIT_S
from tests.tables.engines.replica_faults import (
    QUESTION,
    FaultyEngine,
    ThreadActor,
    answer,
    check,
    faulty_engine,
    prompts,
    without_ray,
)
from vllm_relay.tables.engines.base import Completions, EngineError, Prompt
from vllm_relay.tables.engines.ray_actors.engine import RayEngine
from vllm_relay.tables.engines.replicas import ReplicaEngine
from vllm_relay.tables.question import Question


def open_replica(rng: random.Random, can_die: bool) -> Any:
    """An engine, or one behind an actor."""
    dies_at = rng.randrange(40) if can_die and rng.random() < 0.5 else None
    engine = faulty_engine(rng, dies_at)
    if rng.random() < 0.4:
        return engine
    is_killed = can_die and dies_at is None and rng.random() < 0.7
    dies_after = rng.randrange(1, 30) if is_killed else None
    actor = ThreadActor(lambda: engine, exceptions, random.Random(rng.random()), dies_after)
    return RayEngine(actor, actor.facts, None, "an actor", WAIT_S)


@pytest.fixture
def in_threads() -> Iterator[None]:
    with without_ray():
        yield


def run_case(seed: int) -> None:
    rng = random.Random(seed)
    replicas = [open_replica(rng, number > 0) for number in range(rng.randint(1, 5))]
    rng.shuffle(replicas)
    with closing(ReplicaEngine(replicas, max_buffered=rng.choice([1, 10, 5000]))) as engine:
        for _ in range(2):
            count = rng.choice([1, 30, 150])
            source = prompts(count, random.Random(rng.random()))
            if rng.random() < 0.2:
                # somebody stops waiting: the next question begins anew
                completions = engine.generate(source, QUESTION)
                for _ in range(rng.randrange(count)):
                    next(completions)
                completions.close()
            else:
                check(list(engine.generate(source, QUESTION)), count)


@pytest.mark.parametrize("seed", range(cases(50)))
def test_nothing_is_lost_and_nothing_is_answered_twice(in_threads: None, seed: int) -> None:
    run_case(seed)


@pytest.mark.soak
def test_soak(in_threads: None) -> None:
    for seed in range(10_000, 10_000 + int(os.environ.get("RELAY_SOAK_CASES", "20000")) // 40):
        try:
            run_case(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


class ScoredEngine(FaultyEngine):
    def generate_scored(self, prompts: Iterable[Prompt], question: Question) -> Completions:
        for completion in self.generate(prompts, question):
            yield replace(completion, first_logprobs={"yes": -float(completion.number)})


def test_scores_come_through(in_threads: None) -> None:
    engines: list[Any] = [ScoredEngine(answer=answer, step_s=0.001) for _ in range(2)]
    actor = ThreadActor(engines.pop, exceptions, random.Random(0))
    engines.append(RayEngine(actor, actor.facts, None, "an actor", WAIT_S))
    with closing(ReplicaEngine(engines)) as engine:
        found = list(engine.generate_scored(prompts(60, random.Random(0)), QUESTION))
        check(found, 60)
        assert all(each.first_logprobs == {"yes": -float(each.number)} for each in found)
        plain = list(engine.generate(prompts(60, random.Random(0)), QUESTION))
        assert all(each.first_logprobs is None for each in plain)


def test_when_all_die_what_was_answered_was_answered_once(in_threads: None) -> None:
    rng = random.Random(0)
    engines = [faulty_engine(rng, 3), faulty_engine(rng, 9)]
    found = []
    with pytest.raises(EngineError, match="no replica is left"):
        for completion in ReplicaEngine(engines).generate(prompts(200, rng), QUESTION):
            found.append(completion.number)
    assert len(found) == len(set(found))

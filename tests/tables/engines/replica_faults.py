# SPDX-License-Identifier: Apache-2.0
"""Replicas whose engines fail at random, in threads of this process."""

from __future__ import annotations

import pickle
import random
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import Lock, Thread
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from tests.tables.fake_engine import FakeEngine, Fields, RefusedPrompt, echo
from vllm_relay.tables.engines import replicas as replica_engine
from vllm_relay.tables.engines.base import Completion, Completions, EngineError, Prompt
from vllm_relay.tables.engines.ray_actors import engine as ray_engine
from vllm_relay.tables.engines.ray_actors.replica import Replica
from vllm_relay.tables.ordering.cached_tokens import BlockCache
from vllm_relay.tables.question import Question

T = TypeVar("T")

QUESTION = Question("Which?", ("text",), max_tokens=4)


def refuses(number: int) -> bool:
    """Whether engines refuse the prompt of this number."""
    return number % 11 == 7


def answer(fields: Fields) -> str:
    number = int(fields["text"].strip('"').split()[-1])
    if refuses(number):
        raise RefusedPrompt(f"{number} is refused")
    return echo(fields)


def prompts(count: int, rng: random.Random) -> Iterator[Prompt]:
    """Some with long prefixes that others have, some slow to come."""
    for number in range(count):
        if rng.random() < 0.02:
            time.sleep(rng.uniform(0, 0.02))
        text = f"group {rng.randrange(5)} {number}"
        tokens = [ord(each) for each in text[:7] * 10 + text]
        yield Prompt(number, f'Which?\n\n"text": "{text}"\nAnswer:', tokens)


@dataclass
class FaultyEngine(FakeEngine):
    """
    Attributes:
        rng: of its steps.
        dies_at: number of the step at which it is gone for good; None lives.
        slow: share of its steps that take long.
    """

    rng: random.Random = field(default_factory=random.Random)
    dies_at: int | None = None
    slow: float = 0.0

    def generate(self, prompts: Iterable[Prompt], question: Question) -> Completions:
        self._check(self.num_steps)
        yield from super().generate(prompts, question)

    def _check(self, step: int) -> None:
        if self.dies_at is not None and step >= self.dies_at:
            raise EngineError("it is dead")
        if self.rng.random() < self.slow:
            time.sleep(self.rng.uniform(0, 0.02))

    def __post_init__(self) -> None:
        self.before_step = self._check


class ThreadActor:
    """Stands for Ray's handle of a `Replica`, which runs in threads here.

    Args:
        open_engine: of the replica.
        errors: Ray's module of exceptions.
        rng: of delays.
        dies_after: calls after which the process is killed, and what it was doing is lost.
    """

    def __init__(
        self,
        open_engine: Callable[[], Any],
        errors: Any,
        rng: random.Random,
        dies_after: int | None = None,
    ) -> None:
        self.replica = Replica(open_engine)
        self.facts = self.replica.start(0, 1)
        self._errors = errors
        self._rng = rng
        self._num_left = dies_after
        self._lock = Lock()
        self._pending: set[Future[Any]] = set()
        self._is_dead = False

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=partial(self._call, method))

    def in_its_thread(self, use: Callable[[Any], T]) -> T:
        """What is made of the engine."""
        return self.replica._thread.submit(use, self.replica._engine).result()

    def kill(self) -> None:
        with self._lock:
            self._is_dead = True
            for each in self._pending:
                each.set_exception(self._errors.ActorDiedError())
            self._pending.clear()
        self._end_jobs()

    def _end_jobs(self) -> None:
        for job in list(self.replica._jobs):
            self.replica.end(job)

    def _call(self, method: str, *arguments: Any) -> Future[Any]:
        reply: Future[Any] = Future()
        with self._lock:
            if self._is_dead:
                reply.set_exception(self._errors.ActorDiedError())
                return reply
            self._pending.add(reply)
            if self._num_left is not None:
                self._num_left -= 1
        if self._num_left == 0:
            Thread(target=self.kill).start()
        sent = pickle.dumps(arguments)
        Thread(target=self._run, args=(method, sent, reply, self._rng.uniform(0, 0.003))).start()
        return reply

    def _run(self, method: str, sent: bytes, reply: Future[Any], delay_s: float) -> None:
        time.sleep(delay_s)
        found: Any
        try:
            found = getattr(self.replica, method)(*pickle.loads(sent))
        except Exception as error:
            found = self._errors.RayTaskError(method, "its traceback", error)
        if self._is_dead:
            self._end_jobs()  # one may have begun meanwhile, and its thread would stay
        with self._lock:
            if reply not in self._pending:
                return
            self._pending.remove(reply)
            if isinstance(found, Exception):
                reply.set_exception(found)
            else:
                reply.set_result(pickle.loads(pickle.dumps(found)))


@contextmanager
def without_ray() -> Iterator[None]:
    """Engines of actors ask a `ThreadActor`, and nobody waits for long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_engine.ray, "get", lambda reply, timeout=None: reply.result(timeout))
        patch.setattr(ray_engine.ray, "is_initialized", lambda: True)
        patch.setattr(ray_engine.ray, "kill", lambda actor: actor.kill())
        patch.setattr(ray_engine, "_WAIT_WITH_ROOM_S", 0.005)
        patch.setattr(replica_engine, "_WAIT_S", 0.002)
        patch.setattr(replica_engine, "_PAUSE_S", 0.01)
        yield


def faulty_engine(rng: random.Random, dies_at: int | None) -> FaultyEngine:
    return FaultyEngine(
        answer=answer,
        cache=BlockCache(16, rng.choice([4, 50])),
        max_running=rng.choice([1, 3, 8]),
        num_answer_tokens=rng.randint(1, 4),
        step_s=rng.choice([0.0, 0.0005, 0.002]),
        rng=random.Random(rng.random()),
        dies_at=dies_at,
        slow=rng.choice([0.0, 0.1]),
    )


def check(completions: list[Completion], count: int) -> None:
    """Every prompt once, with its own answer."""
    assert sorted(each.number for each in completions) == list(range(count))
    for each in completions:
        if refuses(each.number):
            assert each.error == f"{each.number} is refused"
        else:
            assert not each.error and each.text.endswith(f' {each.number}\\""}}')

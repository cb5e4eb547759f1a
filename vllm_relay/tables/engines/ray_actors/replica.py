# SPDX-License-Identifier: Apache-2.0
"""What an actor does: it holds an engine, and answers prompts that come in pieces."""

from __future__ import annotations

import os
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from threading import Condition
from typing import Any

import ray

from vllm_relay.tables.engines.base import (
    Completion,
    Completions,
    Engine,
    EngineError,
    JobOver,
    Prompt,
    PromptShape,
    generate,
)
from vllm_relay.tables.ordering.cached_tokens import BlockCache
from vllm_relay.tables.question import Question

_DISTRIBUTIONS = ("vllm", "vllm-relay")


@dataclass(frozen=True)
class ReplicaFacts:
    """
    Attributes:
        versions: of what computes answers.
        max_running: prompts that the engine has at once.
        reasons, model_name: see `Engine`.
        pickled_tokenizer: None if there is none, or it cannot be pickled.
        tokenizer_root: where it was loaded from; "" if there is none.

    The others are those of `Engine`.
    """

    versions: dict[str, str]
    identity: str
    cache: BlockCache | None
    max_model_len: int | None
    max_running: int
    reasons: bool
    model_name: str
    pickled_tokenizer: bytes | None
    tokenizer_root: str

    @classmethod
    def of(cls, engine: Any) -> ReplicaFacts:
        """What an engine says of itself."""
        return cls(
            installed_versions(),
            engine.identity,
            engine.cache,
            engine.max_model_len,
            engine.max_running,
            getattr(engine, "reasons", False),
            getattr(engine, "model_name", ""),
            _pickled(engine.tokenizer),
            getattr(engine.tokenizer, "name_or_path", ""),
        )


class Replica:
    """An actor. Its engine is used in one thread; calls wait in others."""

    def __init__(self, open_engine: Callable[[], Engine]) -> None:
        self._open_engine = open_engine
        self._thread = ThreadPoolExecutor(1)
        self._engine: Any = None
        self._jobs: dict[int, _Job] = {}
        self._numbers = count()

    def machine(self) -> str:
        """Where it is."""
        return ray.get_runtime_context().get_node_id()

    def start(self, number: int, count: int) -> ReplicaFacts:
        """Open the engine.

        Args:
            number: from 0 on, of this one among those that share its machine's cores.

        Raises:
            ValueError: it refuses the model or an argument.
            EngineError: it does not start.
        """
        if (cores := share_of_cores(sorted(os.sched_getaffinity(0)), number, count)) is not None:
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", cores)
        return self._in_thread(self._start)

    def _start(self) -> ReplicaFacts:
        self._engine = self._open_engine()
        return ReplicaFacts.of(self._engine)

    def begin(self, question: Question, is_scored: bool) -> int:
        """The number of a new job, of `generate` or `generate_scored`."""
        number = next(self._numbers)
        answer = partial(generate, self._engine, question=question, is_scored=is_scored)
        job = self._jobs[number] = _Job(answer)
        self._thread.submit(job.run)
        return number

    def exchange(self, job: int, prompts: Sequence[Prompt], wait_s: float) -> list[Completion]:
        """Give prompts to a job, and get the completions that are there by now; waits for the first
        of them, but no longer than is said.

        Raises:
            ValueError: the engine refuses the question.
            EngineError: the engine is gone.
        """
        return self._jobs[job].exchange(prompts, wait_s)

    def end(self, job: int) -> None:
        """What runs of a job is aborted."""
        ended = self._jobs.pop(job, None)
        if ended is not None:
            ended.end()

    def prompts_per_s(self, shape: PromptShape, question: Question) -> float | None:
        return self._in_thread(self._engine.prompts_per_s, shape, question)

    def _in_thread(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return self._thread.submit(call, *arguments).result()
        except Exception as error:
            raise portable(error) from None

    def close(self) -> None:
        """Close the engine."""
        for job in list(self._jobs):
            self.end(job)
        if self._engine is not None:
            self._thread.submit(self._engine.close).result()


class _Job:
    """One question; an iterator of the prompts that wait, which goes on when there are more."""

    def __init__(self, answer: Callable[[Iterable[Prompt]], Completions]) -> None:
        self._answer = answer
        self._changed = Condition()
        self._waiting: deque[Prompt] = deque()
        self._done: list[Completion] = []
        self._failure: Exception | None = None
        self._is_over = False

    def run(self) -> None:
        """In the engine's thread, until the job is over or has failed."""
        try:
            while self._wait_for_prompts():
                with closing(self._answer(self)) as completions:
                    for completion in completions:
                        with self._changed:
                            self._done.append(completion)
                            self._changed.notify_all()
        except JobOver:
            pass
        except BaseException as error:
            with self._changed:
                self._failure = portable(error)
                self._changed.notify_all()

    def _wait_for_prompts(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_over)
            return not self._is_over

    def __iter__(self) -> _Job:
        return self

    def __next__(self) -> Prompt:
        with self._changed:
            if self._is_over:
                raise JobOver
            if not self._waiting:
                raise StopIteration
            return self._waiting.popleft()

    def exchange(self, prompts: Sequence[Prompt], wait_s: float) -> list[Completion]:
        with self._changed:
            self._waiting.extend(prompts)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._done or self._failure, wait_s)
            done, self._done = self._done, []
            if not done and self._failure is not None:
                raise self._failure
            return done

    def end(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()


def portable(error: BaseException) -> ValueError | EngineError:
    """An error of an engine as one that any process can read."""
    if isinstance(error, EngineError):
        return EngineError(str(error))
    if isinstance(error, ValueError):
        return ValueError(str(error))
    return EngineError(f"{type(error).__name__}: {error}")


def share_of_cores(cores: Sequence[int], number: int, count: int) -> str | None:
    """As vLLM's variable for a CPU wants them; None if all have all: one is alone, or there are too
    few."""
    if count < 2 or len(cores) < count:
        return None
    begin, end = (len(cores) * each // count for each in (number, number + 1))
    return ",".join(map(str, cores[begin:end]))


def start_vllm(model: str, arguments: dict[str, Any]) -> Engine:
    """A model in this process: when it is killed, all of the engine is."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm_relay.tables.engines.in_process import start_engine

    return start_engine(model, **arguments)


def installed_versions() -> dict[str, str]:
    """Of what computes answers, in this process."""
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _pickled(tokenizer: Any) -> bytes | None:
    try:
        return None if tokenizer is None else pickle.dumps(tokenizer)
    except (pickle.PicklingError, AttributeError, TypeError):
        return None  # of a class that was made when it was loaded

# SPDX-License-Identifier: Apache-2.0
"""Several engines with the same model as one: each gets the prompts whose prefixes it knows."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from contextvars import copy_context
from functools import partial
from itertools import islice
from queue import SimpleQueue
from threading import Condition, Thread
from typing import TYPE_CHECKING

from vllm_relay.cluster.buckets import BucketPrompt, PrefixBuckets
from vllm_relay.cluster.event_stream import EventEndpoints
from vllm_relay.cluster.replica_index import PredictedCaches, ReplicaIndex, chain_of
from vllm_relay.cluster.told_caches import ToldCaches
from vllm_relay.tables.engines.base import (
    Completion,
    Completions,
    Engine,
    EngineError,
    JobOver,
    Prompt,
    PromptShape,
    generate,
    images_refusal,
)
from vllm_relay.tables.jobs.prompts.format import text_pieces
from vllm_relay.tables.ordering.cached_tokens import BlockCache
from vllm_relay.tables.question import DEFAULT_MAX_TOKENS, Question

if TYPE_CHECKING:
    from vllm_relay.cluster.kv_events import KvEventListener

logger = logging.getLogger("vllm.relay")

DEFAULT_MAX_BUFFERED = 5000
_UNKNOWN_CACHE = BlockCache(16, 65_536)
_MAX_BLOCKS = 1 << 20
"""Of a cache that tells, and does not say how large it is."""
_BATCH = 64
_WAIT_S = 0.05
_PAUSE_S = 0.5


class ReplicaEngine:
    """An `Engine` over engines that are alike.

    Prompts wait in a tree of their prefixes, `max_buffered` of them; an engine that has room takes
    one that begins like those that it had, see `PrefixBuckets`. When an engine is gone the others
    are asked what it has not answered.

    Args:
        engines: with the same model; they are closed with this one.
        max_buffered: prompts that wait for an engine.
        on_close: what ends when the engines have.

    Raises:
        ValueError: there is no engine, or they are not alike; the message names what differs.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        names: Sequence[str] | None = None,
        *,
        max_buffered: int = DEFAULT_MAX_BUFFERED,
        on_close: ExitStack | None = None,
    ) -> None:
        if not engines:
            raise ValueError("no engines given, expected at least one replica")
        if max_buffered < 1:
            raise ValueError(f"max_buffered={max_buffered} given, expected at least 1")
        self.engines = list(engines)
        self._names = list(names or (f"replica {number}" for number in range(len(engines))))
        self._max_buffered = max_buffered
        self._on_close = on_close or ExitStack()
        for what, values in (
            ("models", [each.identity for each in engines]),
            ("longest prompts", [each.max_model_len for each in engines]),
            ("block sizes", [each.cache and each.cache.block_size_tokens for each in engines]),
            ("tokenizers", [each.tokenizer is not None for each in engines]),
            ("kinds of prompts", [images_refusal(each) is None for each in engines]),
        ):
            if len(set(values)) > 1:
                listed = ", ".join(
                    f"{name}: {value}" for name, value in zip(self._names, values, strict=True)
                )
                raise ValueError(
                    f"replicas with different {what} given ({listed}), expected equal ones: start "
                    "all with the same options"
                )
        self.identity = engines[0].identity
        self.tokenizer = engines[0].tokenizer
        self.max_model_len = engines[0].max_model_len
        self.reasons = getattr(engines[0], "reasons", False)
        self.model_name: str = getattr(engines[0], "model_name", "")
        self.images_refusal = images_refusal(engines[0])
        # the smallest: no prompt is known to more than one
        caches = [each.cache for each in engines if each.cache is not None]
        self.cache = min(caches, key=lambda each: each.num_blocks or 1 << 62, default=None)
        self._heard: KvEventListener | None = None

    def hear(self, endpoints: Sequence[EventEndpoints], ranks: Sequence[int | None]) -> None:
        """Know from vLLM's KV events what the engines' caches hold, see `KvEventListener`.

        Raises:
            ValueError: the events would say nothing of the prompts, or vLLM is not installed.
        """
        caches = [each.cache for each in self.engines if each.cache is not None]
        missing = "" if self.tokenizer else "its tokenizer is not at hand: give tokenizer="
        if len(caches) < len(self.engines):
            missing = "it does not say its block size in /metrics, as vLLM does"
        if missing:
            raise ValueError(f"kv_events given for {self._names[0]}, but {missing}")
        try:
            from vllm_relay.cluster.kv_events import KvEventListener
        except ModuleNotFoundError as error:
            raise ValueError(
                f"kv_events given, which are read as vLLM writes them, and {error.name} is not "
                f"installed: pip install vllm, or leave kv_events out"
            ) from error
        told = ToldCaches(
            [each.num_blocks or _MAX_BLOCKS for each in caches], caches[0].block_size_tokens
        )
        self._heard = KvEventListener(told, endpoints, ranks)

    def generate(self, prompts: Iterable[Prompt], question: Question) -> Completions:
        """See `Engine`: ends with an `EngineError` when no replica is left."""
        return self._job(question).run(prompts)

    def generate_scored(self, prompts: Iterable[Prompt], question: Question) -> Completions:
        return self._job(question, is_scored=True).run(prompts)

    def _job(self, question: Question, *, is_scored: bool = False) -> _ReplicaJob:
        return _ReplicaJob(
            self.engines,
            self._names,
            question,
            self._max_buffered,
            None if self._heard is None else self._heard.caches,
            is_scored=is_scored,
        )

    def max_answer_tokens(self, question: Question) -> int:
        return max(each.max_answer_tokens(question) for each in self.engines)

    def prompts_per_s(self, shape: PromptShape, question: Question) -> float | None:
        """As many times what the first replica has, as there are replicas."""
        one = self.engines[0].prompts_per_s(shape, question)
        return None if one is None else one * len(self.engines)

    def close(self) -> None:
        """Close all replicas, also where one of them raises; more calls do nothing."""
        with ExitStack() as opened:
            opened.callback(self._on_close.close)
            for engine in reversed(self.engines):
                opened.callback(engine.close)
            if self._heard is not None:
                opened.callback(self._heard.close)


class _Feed:
    """Prompts of a replica; where there is none for it now, there may be one later.

    Where all that waits is better asked elsewhere, that is not asked again at once: what comes next
    may begin like what this replica had, and another one may be about to take what is left.
    """

    def __init__(self, first: Prompt, job: _ReplicaJob, number: int) -> None:
        self._first: Prompt | None = first
        self._job = job
        self._number = number
        self._is_enough = -1
        """As long as so many prompts run, at least, none is taken,"""
        self._until_s = 0.0
        """until then."""

    def __iter__(self) -> _Feed:
        return self

    def __next__(self) -> Prompt:
        prompt, self._first = self._first or self._take(), None
        if prompt is None:
            raise StopIteration
        return prompt

    def _take(self) -> Prompt | None:
        now_s, num_running = time.monotonic(), self._job.num_running(self._number)
        if now_s < self._until_s and num_running >= self._is_enough:
            return None
        prompt = self._job.take(self._number)
        if prompt is None:
            self._is_enough = num_running // 2 + 1
            self._until_s = math.inf if self._job.is_read else now_s + _PAUSE_S
        return prompt


class _ReplicaJob:
    """The prompts of one question; what it knows is guarded by `_changed`."""

    def __init__(
        self,
        engines: Sequence[Engine],
        names: Sequence[str],
        question: Question,
        max_buffered: int,
        held: ReplicaIndex | None,
        *,
        is_scored: bool,
    ) -> None:
        self._generate = partial(generate, is_scored=is_scored)
        self._engines = engines
        self._names = names
        self._question = question
        self._max_buffered = max_buffered
        caches = [each.cache or _UNKNOWN_CACHE for each in engines]
        self._block_size_tokens = caches[0].block_size_tokens
        num_blocks = [each.num_blocks or _UNKNOWN_CACHE.num_blocks or 1 for each in caches]
        self._buckets: PrefixBuckets[Prompt] = PrefixBuckets(
            held or PredictedCaches(num_blocks),
            self._block_size_tokens,
            min(engines[0].max_answer_tokens(question), DEFAULT_MAX_TOKENS),
        )
        self._running: list[dict[int, BucketPrompt[Prompt]]] = [{} for _ in engines]
        self._changed = Condition()
        self.is_read = False
        """Whether no prompt comes any more but those of lost replicas."""
        self._is_over = False
        self._came: SimpleQueue[tuple[int, Completion | BaseException]] = SimpleQueue()

    def run(self, prompts: Iterable[Prompt]) -> Completions:
        source = iter(prompts)
        threads = [
            # with the span around the job, which is a context variable
            Thread(target=copy_context().run, args=(self._ask, number), name=name, daemon=True)
            for number, name in enumerate(self._names)
        ]
        num_left = len(threads)
        num_open = 0
        try:
            for thread in threads:
                thread.start()
            while True:
                num_open += self._read(source)
                if self.is_read and not num_open:
                    return
                number, came = self._came.get()
                if isinstance(came, Completion):
                    num_open -= 1
                    yield came
                elif isinstance(came, EngineError):
                    num_left -= 1
                    self._lose(number, came, num_left)
                else:
                    raise came
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()

    def _read(self, source: Iterator[Prompt]) -> int:
        """Fill the buffer, but for answers that came; returns how many prompts were read."""
        num_read = 0
        while not self.is_read:
            room = self._max_buffered - len(self._buckets)
            if room < 1 or (num_read and not self._came.empty()):
                break
            batch = list(islice(source, min(room, _BATCH)))
            waiting = self._bucket_prompts(batch)
            with self._changed:
                for prompt in waiting:
                    self._buckets.add(prompt)
                self.is_read = len(batch) < min(room, _BATCH)
                self._changed.notify_all()
            num_read += len(batch)
        return num_read

    def _ask(self, number: int) -> None:
        """A replica's thread."""
        running = self._running[number]
        try:
            while (first := self._wait_for_prompt(number)) is not None:
                feed = _Feed(first, self, number)
                engine = self._engines[number]
                with closing(self._generate(engine, feed, self._question)) as completions:
                    for completion in completions:
                        with self._changed:
                            if self._is_over:
                                return
                            running.pop(completion.number, None)
                            # servers need not say how many there were
                            if completion.num_output_tokens:
                                self._buckets.answered(completion.num_output_tokens)
                        self._came.put((number, completion))
        except JobOver:
            return
        except BaseException as error:
            self._came.put((number, error))

    def _wait_for_prompt(self, number: int) -> Prompt | None:
        """The next prompt of a replica that has none; None when the job is over."""
        with self._changed:
            while not self._is_over:
                if (prompt := self._take(number)) is not None:
                    return prompt
                self._changed.wait()
            return None

    def take(self, number: int) -> Prompt | None:
        """A prompt for a replica, if there is one; waits for a moment where more may come.

        Raises:
            JobOver: nobody waits for more.
        """
        with self._changed:
            if self._is_over:
                raise JobOver
            prompt = self._take(number)
            if prompt is None and not self.is_read:
                self._changed.wait(_WAIT_S)
                prompt = self._take(number)
            return prompt

    def num_running(self, number: int) -> int:
        """Prompts that a replica has."""
        return len(self._running[number])

    def _take(self, number: int) -> Prompt | None:
        found = None if self._is_over else self._buckets.next(number)
        if found is None:
            return None
        self._running[number][found.item.number] = found
        return found.item

    def _lose(self, number: int, error: EngineError, num_left: int) -> None:
        if not num_left:
            raise EngineError(f"no replica is left; the last one, {self._names[number]}: {error}")
        logger.warning(
            "vllm-relay: %s is gone (%s); the other %d are asked what it did not answer",
            self._names[number], error, num_left,
        )  # fmt: skip
        with self._changed:
            self._buckets.lose(number)
            for prompt in self._running[number].values():
                self._buckets.add(prompt)
            self._running[number].clear()
            self._changed.notify_all()

    def _bucket_prompts(self, prompts: Sequence[Prompt]) -> list[BucketPrompt[Prompt]]:
        """With the full blocks of each; without tokens, of what it says."""
        tokens = [prompt.token_ids or text_pieces(prompt.message) for prompt in prompts]
        return [
            BucketPrompt(
                prompt,
                chain_of(each, self._block_size_tokens),
                len(each),
            )
            for prompt, each in zip(prompts, tokens, strict=True)
        ]

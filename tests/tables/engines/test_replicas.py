# SPDX-License-Identifier: Apache-2.0
"""Several engines as one: nothing is lost, nothing is answered twice, prefixes stay together."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

import pyarrow as pa
import pytest

from tests.support.waiting import WAIT_S
from tests.tables.fake_engine import FakeEngine
from vllm_relay.cluster.buckets import PrefixBuckets
from vllm_relay.tables import llm_map
from vllm_relay.tables.engines import replicas as replicas_module
from vllm_relay.tables.engines.base import Completions, EngineError, Prompt
from vllm_relay.tables.engines.replicas import ReplicaEngine
from vllm_relay.tables.ordering.cached_tokens import BlockCache
from vllm_relay.tables.question import Question

CACHE = BlockCache(16, 1000)


def table(num_groups: int, rows_each: int) -> pa.Table:
    """Rows that share a long text, in an order that mixes them."""
    numbers = [(row, group) for row in range(rows_each) for group in range(num_groups)]
    return pa.table(
        {
            "product": [
                f"product {group} " + "is described at length " * 20 for _, group in numbers
            ],
            "row": [1000 * group + row for row, group in numbers],
        }
    )


def ask(engine: Any, rows: pa.Table, **options: Any) -> Any:
    return llm_map(rows, "Which {row} of {product}?", engine=engine, show_progress=False, **options)


class Held(FakeEngine):
    """Takes no prompt but the first before all wait."""

    def __init__(self, all_wait: threading.Event, before_step: Callable[[int], None]) -> None:
        super().__init__(cache=CACHE, before_step=before_step)
        self._all_wait = all_wait

    def generate(self, prompts: Iterable[Prompt], question: Question) -> Completions:
        assert self._all_wait.wait(WAIT_S)
        yield from super().generate(prompts, question)


@pytest.fixture
def all_wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], threading.Event]:
    """Says when so many prompts wait for engines, or were given to one."""

    def when(num_prompts: int) -> threading.Event:
        happened, added = threading.Event(), count(1)

        class Counted(PrefixBuckets[Any]):
            def add(self, prompt: Any) -> None:
                super().add(prompt)
                if next(added) == num_prompts:
                    happened.set()

        monkeypatch.setattr(replicas_module, "PrefixBuckets", Counted)
        return happened

    return when


def engines(count: int, **options: Any) -> list[FakeEngine]:
    return [FakeEngine(cache=CACHE, **options) for _ in range(count)]


def groups_of(engine: FakeEngine) -> Counter[str]:
    return Counter(prompt.message.partition("product ")[2].split()[0] for prompt in engine.prompts)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("max_buffered", [1, 7, 5000])
def test_answers_are_those_of_one_engine(count: int, max_buffered: int) -> None:
    rows = table(6, 9)
    replicas = engines(count)
    result = ask(ReplicaEngine(replicas, max_buffered=max_buffered), rows)
    assert result.errors == {}
    assert result.values.to_pylist() == ask(FakeEngine(), rows).values.to_pylist()
    asked = Counter(prompt.message for each in replicas for prompt in each.prompts)
    assert set(asked.values()) == {1} and len(asked) == len(rows)


def test_rows_that_share_a_text_go_to_one_replica(all_wait: Any) -> None:
    together = threading.Barrier(3, timeout=WAIT_S)

    def equally_fast(step: int) -> None:
        if step < 6:
            together.wait()

    read = all_wait(12 * 20)
    replicas = [Held(read, equally_fast) for _ in range(3)]
    ask(ReplicaEngine(replicas), table(12, 20))
    homes = [set(groups_of(each)) for each in replicas]
    # of the last three groups a replica that has none left joins one, then what is left of another
    num_visits = sum(map(len, homes))
    assert num_visits <= 12 + 3
    assert all(len(each.prompts) > 40 for each in replicas)


def test_answers_count_as_long_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    class Told(PrefixBuckets[Any]):
        def __init__(self, caches: Any, size: int, answer_tokens: float) -> None:
            super().__init__(caches, size, answer_tokens)
            told.append(answer_tokens)

        def add(self, prompt: Any) -> None:
            super().add(prompt)
            assert prompt.num_tokens < 1000

        def answered(self, num_tokens: int) -> None:
            super().answered(num_tokens)
            told.append(num_tokens)

    monkeypatch.setattr(replicas_module, "PrefixBuckets", Told)
    rows = table(2, 3)
    for max_tokens, assumed in ((1024, 64), (5, 5)):
        told.clear()
        ask(ReplicaEngine(engines(2, num_answer_tokens=3)), rows, max_tokens=max_tokens)
        assert told == [assumed, *[3] * len(rows)]


def test_a_slow_replica_gets_less(all_wait: Any) -> None:
    has_most = threading.Event()

    def quick(step: int) -> None:
        if len(fast.prompts) > 220:
            has_most.set()

    def slowly(step: int) -> None:
        assert has_most.wait(WAIT_S)

    read = all_wait(10 * 30)
    fast, slow = Held(read, quick), Held(read, slowly)
    ask(ReplicaEngine([fast, slow]), table(10, 30))
    assert len(slow.prompts) < len(fast.prompts) / 2


def test_what_a_lost_replica_did_not_answer_is_asked_elsewhere() -> None:
    is_dead = threading.Event()

    def dies(step: int) -> None:
        if step == 3:
            is_dead.set()
            raise EngineError("the machine is off")

    def waits(step: int) -> None:
        assert is_dead.wait(WAIT_S)

    dying, other = engines(1, before_step=dies) + engines(1, before_step=waits)
    rows = table(8, 12)
    result = ask(ReplicaEngine([dying, other], ["first", "second"]), rows)
    assert result.errors == {}
    assert result.values.to_pylist() == ask(FakeEngine(), rows).values.to_pylist()
    asked = Counter(prompt.message for each in (dying, other) for prompt in each.prompts)
    twice = sum(count - 1 for count in asked.values())
    assert 0 < twice <= 2 * dying.max_running, "only what was on its way is asked twice"


def test_when_no_replica_is_left_the_job_ends() -> None:
    def dies(step: int) -> None:
        raise EngineError("the machine is off")

    replicas = engines(2, before_step=dies)
    with pytest.raises(EngineError, match="no replica is left; the last one, b?a?.*machine is off"):
        ask(ReplicaEngine(replicas, ["a", "b"]), table(4, 4))


def test_an_error_of_another_kind_is_not_hidden() -> None:
    def fails(step: int) -> None:
        raise ZeroDivisionError("a defect")

    with pytest.raises(ZeroDivisionError, match="a defect"):
        ask(ReplicaEngine([FakeEngine(cache=CACHE, before_step=fails)]), table(2, 2))


def test_no_thread_is_left() -> None:
    before = threading.active_count()
    replicas = engines(3)
    engine = ReplicaEngine(replicas)
    ask(engine, table(3, 3))
    engine.close()
    assert all(each.is_closed for each in replicas)
    for thread in threading.enumerate():
        if thread.name.startswith("replica "):
            thread.join(WAIT_S)
    assert threading.active_count() <= before


@pytest.mark.parametrize("failing", range(4))
def test_all_are_closed_where_one_cannot_be(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("it runs yet")

    heard, *replicas = everything = engines(4)
    engine = ReplicaEngine(replicas)
    monkeypatch.setattr(engine, "_heard", heard)
    monkeypatch.setattr(everything[failing], "close", fails)
    with pytest.raises(RuntimeError, match="it runs yet"):
        engine.close()
    assert [each.is_closed for each in everything] == [n != failing for n in range(4)]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"identity": "other"}, "different models given .*replica 0: fake, replica 1: other"),
        ({"max_model_len": 7}, "different longest prompts given"),
        ({"cache": BlockCache(32)}, "different block sizes given .*replica 1: 32"),
    ],
)
def test_replicas_that_differ_are_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        ReplicaEngine([FakeEngine(cache=CACHE), FakeEngine(**{"cache": CACHE, **options})])


def test_none_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one replica"):
        ReplicaEngine([])

# SPDX-License-Identifier: Apache-2.0
"""What is timed, and how often, by a clock that the searches move."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.sparse import index_timing
from benchmarks.sparse.index_timing import Run, full_run, in_turn, search_run
from vllm_relay.sparse import Dipr, FlatIndex
from vllm_relay.sparse.index.elements import from_float32

KEYS, GROUP, SIZE = 600, 2, 32


class Clock:
    """Stands still but for the runs it makes."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.calls: list[str] = []

    def run(self, name: str, *times_us: float) -> Run:
        """Takes these times in turn."""
        left = list(times_us)

        def call(rows: np.ndarray) -> np.ndarray:
            self.calls.append(name)
            self.now_ns += round(1e3 * left[0])
            left.append(left.pop(0))
            return rows

        return call

    def thread_time_ns(self) -> int:
        return self.now_ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(index_timing, "time", clock)
    return clock


def test_all_take_turns_and_every_second_round_goes_backwards(clock: Clock) -> None:
    runs = [clock.run("a", 10), clock.run("b", 30)]
    times = in_turn(runs, np.zeros((3, 1, 4), np.float32), 3)
    assert times.tolist() == [[10, 10, 10], [30, 30, 30]]
    # in each round one call that is not timed, then one for each token
    assert "".join(clock.calls) == "bbbbaaaaaaaabbbbbbbbaaaa"


def test_what_is_timed_is_attention_over_what_is_found() -> None:
    rng = np.random.default_rng(0)
    keys, values = rng.standard_normal((2, KEYS, SIZE), np.float32)
    rows = rng.standard_normal((GROUP, SIZE), np.float32)
    stored = from_float32(keys, "float32"), from_float32(values, "float32")
    weights = np.exp(rows @ keys[:400].T / SIZE**0.5)
    expected = weights @ values[:400] / weights.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(full_run(*stored, 400)(rows), expected, atol=1e-5)
    index = FlatIndex().build(stored[0])
    found = search_run(index, stored[1], Dipr(alpha=1e-6), 400)(rows)
    np.testing.assert_allclose(found, expected, atol=1e-3)

# SPDX-License-Identifier: Apache-2.0
"""Arrivals, from what is given."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.depth import cases
from vllm_relay.prefix_cache.predict.input import InputLine, LineError
from vllm_relay.prefix_cache.predict.load import arrivals_of, poisson_s


def lines(*fields: dict[str, Any], synthetic: bool = False) -> list[InputLine]:
    return [
        InputLine(number, token_ids=[1], synthetic=synthetic, **each)
        for number, each in enumerate(fields, start=1)
    ]


def test_offline_has_no_arrivals() -> None:
    assert arrivals_of("offline", lines({"timestamp": "never"})) is None


def test_timestamps_count_from_the_first() -> None:
    assert arrivals_of("timestamps", lines({"arrival_s": 5}, {"arrival_s": 5.5})) == [0, 0.5]
    assert arrivals_of("timestamps", lines({"timestamp": 3}, {"arrival_s": 7})) == [0, 4]


def test_those_of_traces_are_milliseconds() -> None:
    given = lines({"timestamp": 1500}, {"timestamp": 4000}, {"arrival_s": 4}, synthetic=True)
    assert arrivals_of("timestamps", given) == [0, 2.5, 2.5]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({}, "line 2: given no timestamp, expected arrival_s in seconds, or timestamp"),
        ({"timestamp": 9, "arrival_s": 9}, "given timestamp and arrival_s, expected"),
        ({"arrival_s": 4.5}, r"given an arrival at 4.5 s, expected none before .* 5 s: sort"),
        ({"arrival_s": -1}, "arrival_s: given -1, expected a number from 0"),
        ({"arrival_s": "9"}, "arrival_s: given '9', expected a number from 0"),
        ({"arrival_s": True}, "arrival_s: given True, expected a number from 0"),
        ({"timestamp": float("nan")}, "timestamp: given nan, expected a number from 0"),
        ({"timestamp": float("inf")}, "timestamp: given inf, expected a number from 0"),
        ({"timestamp": [9]}, r"timestamp: given \[9\], expected a number from 0"),
    ],
)
def test_bad_timestamps_are_refused(second: dict[str, Any], message: str) -> None:
    with pytest.raises(LineError, match=message):
        arrivals_of("timestamps", lines({"arrival_s": 5}, second))


@settings(max_examples=cases(20), deadline=None)
@given(rate=st.floats(0.01, 1e4), seed=st.integers(0, 9))
def test_random_arrivals_have_the_rate(rate: float, seed: int) -> None:
    arrivals_s = poisson_s(rate, 2000, seed)
    assert arrivals_s == sorted(arrivals_s)
    assert arrivals_s[0] > 0
    assert 2000 / arrivals_s[-1] == pytest.approx(rate, rel=0.2)


def test_random_arrivals_are_the_same_every_time() -> None:
    assert arrivals_of("poisson:20", lines({}, {})) == arrivals_of("poisson:20", lines({}, {}))

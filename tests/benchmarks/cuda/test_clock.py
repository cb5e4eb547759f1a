# SPDX-License-Identifier: Apache-2.0
import time

import pytest

from benchmarks.cuda.clock import Clock
from benchmarks.cuda.parts import NAMES, PARTS, STARTUP_S, TOTAL_S, chosen


def test_a_part_may_use_what_those_before_it_left() -> None:
    clock = Clock(100, time.time() - 5)
    clock.allow(10)
    clock.allow(20)
    assert clock.left_s == pytest.approx(25, abs=1)
    assert clock.has(20)
    assert not clock.has(40)


def test_no_part_goes_on_after_the_end_of_the_run() -> None:
    clock = Clock(100, time.time() - 90)
    clock.allow(1000)
    assert clock.left_s == pytest.approx(10, abs=1)


def test_budgets_fit_into_eight_minutes() -> None:
    assert STARTUP_S + sum(part.budget_s for part in PARTS) <= TOTAL_S < 480


def test_parts_are_chosen_by_name_in_their_own_order() -> None:
    assert tuple(part.name for part in chosen("")) == NAMES
    assert [part.name for part in chosen("grid,correct")] == ["correct", "grid"]
    with pytest.raises(ValueError, match="unknown parts x: known are correct"):
        chosen("grid,x")

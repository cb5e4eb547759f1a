# SPDX-License-Identifier: Apache-2.0
"""When statistics are logged, and that none are lost where an engine ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCore

from vllm_relay import statistics_log
from vllm_relay.attention_backends.step_stats import RelayStats
from vllm_relay.prefix_cache.stats import PrefixCacheStats
from vllm_relay.statistics_log import StatisticsLog, end_log_of, log_of
from vllm_relay.vllm_changes.engine_core import call_before_end

STEP = RelayStats(1, 4, 3, 100, 60, 0.5, forest_depth=2, groups=2)


class Logged:
    """A log and its clock."""

    def __init__(self, every_s: float) -> None:
        self.now_s = 100.0
        self.log = StatisticsLog(every_s, lambda: self.now_s)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(
        statistics_log.logger, "info", lambda text, *given: found.append(text % given)
    )
    return found


def test_a_line_covers_the_steps_since_the_last_one(lines: list[str]) -> None:
    logged = Logged(5.0)
    for logged.now_s in (101.0, 106.0, 107.0):
        logged.log.add(STEP)
    assert len(lines) == 1
    assert lines[0].startswith(
        "vllm-relay: 2 steps, 8 request-steps (6 shared), 200 KV tokens attended, 120 read "
        "(40.0% saved)"
    )
    assert STEP.steps == 1, "is its owner's"
    for logged.now_s in (110.0, 111.0):
        logged.log.add(STEP)
    assert len(lines) == 2 and "3 steps" in lines[1]


def test_each_kind_has_a_line(lines: list[str]) -> None:
    logged = Logged(5.0)
    logged.log.add(STEP)
    logged.now_s = 105.0
    logged.log.add(PrefixCacheStats(prefix_query_tokens=64), lambda stats: f"{stats}; and more")
    assert "1 steps" in lines[0]
    assert "0 of 64 tokens hit" in lines[1] and lines[1].endswith("; and more")


def test_what_is_left_is_logged_once(lines: list[str]) -> None:
    logged = Logged(5.0)
    logged.log.flush()
    assert lines == []
    logged.log.add(STEP)
    for _ in range(2):
        logged.log.flush()
    assert len(lines) == 1


def test_no_line_unless_asked_for(lines: list[str]) -> None:
    logged = Logged(0.0)
    logged.log.add(STEP)
    logged.now_s = 1000.0
    logged.log.add(STEP)
    logged.log.flush()
    assert lines == []


def test_a_burst_is_logged_before_its_engine_core_ends(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else of the core is there any more after that."""
    monkeypatch.setattr(EngineCore, "shutdown", lambda core: lines.append("the core has ended"))
    call_before_end(lambda core: end_log_of(core.scheduler))
    core: Any = object.__new__(EngineCore)
    relay = {"log_every_s": 3600}
    core.scheduler = SimpleNamespace(
        vllm_config=SimpleNamespace(additional_config={"relay": relay})
    )
    log_of(core.scheduler).add(STEP)
    core.shutdown()
    assert len(lines) == 2 and "1 steps" in lines[0] and lines[1] == "the core has ended"


def test_an_engine_core_without_statistics_ends_in_silence() -> None:
    end_log_of(SimpleNamespace())

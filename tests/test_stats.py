# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from vllm_relay.attention_backends.groups import PlanStats
from vllm_relay.attention_backends.step_stats import COUNTERS, GAUGES, RelayStats, StepRecorder


def plan(requests: int, shared: int, logical: int, read: int, depth: int, groups: int) -> PlanStats:
    return PlanStats(
        requests=requests,
        requests_shared=shared,
        kv_tokens_logical=logical,
        kv_tokens_read=read,
        forest_depth=depth,
        groups=groups,
        planning_time_s=0.5,
    )


def test_every_field_is_a_counter_or_a_gauge() -> None:
    assert [*COUNTERS, *GAUGES, "long_contexts"] == list(RelayStats().to_dict())


def test_plans_of_one_step_are_one_step() -> None:
    recorder = StepRecorder()
    recorder.begin_step()
    recorder.add_plan(plan(4, 3, 100, 60, 2, 2))
    recorder.add_plan(plan(4, 2, 50, 40, 1, 1))
    assert recorder.take_step() == RelayStats(
        steps=1,
        request_steps=4,
        request_steps_shared=3,
        kv_tokens_logical=150,
        kv_tokens_read=100,
        planning_seconds=1.0,
        forest_depth=2,
        groups=3,
    )
    assert recorder.take_step() is None


def test_step_that_nobody_took_is_forgotten() -> None:
    recorder = StepRecorder()
    recorder.add_plan(plan(4, 3, 100, 60, 2, 2))
    recorder.begin_step()
    assert recorder.take_step() is None


def test_merge_sums_counters_and_keeps_the_last_gauges() -> None:
    stats = RelayStats(1, 4, 3, 100, 60, 0.5, forest_depth=2, groups=2)
    stats.merge(RelayStats(2, 1, 0, 10, 10, 0.25, forest_depth=0, groups=0))
    assert stats == RelayStats(3, 5, 3, 110, 70, 0.75, forest_depth=0, groups=0)

# SPDX-License-Identifier: Apache-2.0
"""The count of overtaken requests, against one that looks at all."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.calls import count_calls
from tests.support.depth import cases
from vllm_relay.scheduler.fairness import OvertakenCount

events = st.lists(st.tuples(st.sampled_from(["come", "run", "leave", "again"]), st.integers(0, 99)))


@settings(max_examples=cases(100), deadline=None)
@given(events)
def test_it_is_what_a_look_at_all_finds(events: list[tuple[str, int]]) -> None:
    counter, waiting, gone = OvertakenCount(), set[int](), set[int]()
    latest_run = come = 0
    for event, chosen in events:
        if event == "come":
            counter.waits(come)
            waiting.add(come)
            come += 1
        elif event == "again" and gone:
            position = sorted(gone)[chosen % len(gone)]
            counter.waits(position)
            waiting.add(position)
            gone.remove(position)
        elif event in ("run", "leave") and waiting:
            position = sorted(waiting)[chosen % len(waiting)]
            counter.waits_no_longer(position, event == "run")
            waiting.remove(position)
            gone.add(position)
            if event == "run":
                latest_run = max(latest_run, position)
        assert counter.count == sum(position < latest_run for position in waiting)


def test_nobody_who_waits_is_looked_at() -> None:
    counter, num_waiting = OvertakenCount(), 100_000
    for position in range(num_waiting):
        counter.waits(position)
    counter.waits_no_longer(10, False)
    assert count_calls(lambda: counter.waits_no_longer(num_waiting - 1, True)) < 20
    assert counter.count == num_waiting - 2

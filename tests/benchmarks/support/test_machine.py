# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from benchmarks.support import machine


def test_two_threads_have_a_peak_too() -> None:
    """The compiler may leave out what it does not see read, of a thread that it inlines."""
    peak = machine.measure_peak(threads=2)
    rates = {name: rate for name, rate in peak.items() if name != "threads"}
    assert peak["threads"] == 2 and len(rates) >= 4
    assert all(rate > 0 for rate in rates.values())

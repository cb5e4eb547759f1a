# SPDX-License-Identifier: Apache-2.0
"""The page under deltas for a long time: run with `-m soak`, RELAY_SOAK_S seconds long, and beyond
1,000 of them with `-o faulthandler_timeout=0`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from tests.page.static.browser import Tab
from tests.page.static.server import FeedServer
from tests.page.static.simulated import SimulatedCache, hello

SECONDS = float(os.environ.get("RELAY_SOAK_S", "60"))
ROUND = 100  # deltas
KEPT_RECORDS = 400_000  # of the page's timeline


@pytest.mark.soak
def test_its_memory_stays_as_it_is_and_it_keeps_up(
    tab: Tab, serve: Callable[..., FeedServer]
) -> None:
    """From when its timeline is full on; after each round it shows what was told last."""
    cache = SimulatedCache(nodes=2000, requests=200)
    server = serve(("hello", hello()), ("snapshot", cache.snapshot()))
    tab.open(server.address)
    tab.wait_text("#columns", "prefixes")
    records = 0
    heaps: list[int] = []
    began_s = time.monotonic()
    while len(heaps) < 5 or time.monotonic() - began_s < SECONDS:
        for _ in range(ROUND):
            delta = cache.delta(arrivals=60)
            records += 1 + sum(len(delta[name]) for name in ("added", "changed", "removed"))
            server.send("delta", delta)
        attended = cache.stats()["kv_tokens_logical"]
        tab.wait(f"document.querySelector('#attended').title === '{attended:,}'")
        if records > KEPT_RECORDS:
            heaps.append(tab.heap_bytes())
    assert max(heaps) < 1.2 * heaps[0], heaps

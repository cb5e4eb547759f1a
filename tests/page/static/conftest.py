# SPDX-License-Identifier: Apache-2.0
"""One Chromium for all tests, and a page that may ask nobody but its server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.page.static.browser import CHROMIUM, Tab, chromium_tab
from tests.page.static.server import FeedServer
from tests.page.static.simulated import SimulatedCache, hello


@pytest.fixture(scope="module")
def chromium() -> Iterator[Tab]:
    if CHROMIUM is None:
        pytest.skip("needs Debian's package chromium, as .ci/run has it")
    with chromium_tab() as opened:
        yield opened


@pytest.fixture
def servers() -> Iterator[ExitStack]:
    """They end after the page has left them."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def tab(chromium: Tab, servers: ExitStack) -> Iterator[Tab]:
    """Nothing may be left in its `messages`, nor may it ask other hosts. What it stores belongs to
    the port of a test's server."""
    chromium.reset()
    yield chromium
    chromium.evaluate("1")  # what was said until now has come
    messages, urls = list(chromium.messages), list(chromium.urls)
    chromium.reset()
    assert messages == []
    assert len({url.split("/")[2] for url in urls if url.startswith("http")}) <= 1


@pytest.fixture
def cache() -> SimulatedCache:
    return SimulatedCache(nodes=60)


@pytest.fixture
def server(cache: SimulatedCache, servers: ExitStack) -> FeedServer:
    """Of the cache as it is when a viewer comes."""

    def first(texts: bool) -> list[tuple[str, dict]]:
        snapshot = cache.snapshot()
        if not texts:
            snapshot["nodes"] = [{**node, "text": None} for node in snapshot["nodes"]]
        return [("hello", hello(texts=texts)), ("snapshot", snapshot)]

    return servers.enter_context(FeedServer(first).running())


@pytest.fixture
def page(tab: Tab, server: FeedServer) -> Tab:
    """That shows the server's snapshot."""
    tab.open(server.address)
    tab.wait_text("#columns", "prefixes")
    return tab


@pytest.fixture
def serve(servers: ExitStack) -> Callable[..., FeedServer]:
    """Servers of events that are given, the same for each viewer."""
    return lambda *events: servers.enter_context(FeedServer(lambda texts: list(events)).running())

# SPDX-License-Identifier: Apache-2.0
"""The page and its server: keys, connections that end, recordings, and what is sent at all."""

from __future__ import annotations

import json
from collections.abc import Callable

from tests.page.static.browser import Tab
from tests.page.static.selected import select_first
from tests.page.static.server import FeedServer
from tests.page.static.simulated import SimulatedCache, apply, hello
from tests.support.waiting import wait_for

EMPTY = {
    "source": "0",
    "time_s": 1.0,
    "nodes": [],
    "stats": SimulatedCache(nodes=0, beginnings=0).stats(),
}


def test_the_key_is_asked_for_and_kept_in_the_tab(tab: Tab, server: FeedServer) -> None:
    server.key = "right"
    tab.open(server.address)
    tab.wait("document.querySelector('#key-dialog').open")
    tab.wait_text("#key-reason", "Bearer API_KEY")
    tab.press("Escape")
    tab.wait_text("#empty", "Press K to enter it.")
    tab.press("k")
    tab.wait("document.querySelector('#key-dialog').open")
    for key in ("wrong", "right"):
        tab.evaluate(f"document.querySelector('#key').value = '{key}'")
        tab.click("#key-dialog button")
        tab.wait(f"sessionStorage.getItem('relay-api-key') === '{key}'")
        tab.wait(f"document.querySelector('#key-dialog').open === {str(key == 'wrong').lower()}")
    tab.wait_text("#columns", "prefixes")
    assert "right" not in tab.evaluate("JSON.stringify(localStorage)")
    assert "right" not in tab.evaluate("document.cookie + location.href")
    tab.evaluate("location.reload()")
    tab.wait_text("#columns", "prefixes")
    assert [said for said in tab.messages if "401" not in said] == []
    tab.messages.clear()


def test_it_connects_again_and_says_so(
    page: Tab, cache: SimulatedCache, server: FeedServer
) -> None:
    cache.delta(arrivals=8)
    server.drop()
    page.wait_text("#state", "Connection lost: the server closed the connection")
    page.wait_text("#state", "Live")
    page.wait_text(".source-head", f"{len(cache.nodes)} prefixes")
    # a delta that does not fit what came before: only a new snapshot helps
    wrong = {**cache.delta(arrivals=0), "removed": [10**6]}
    server.send("delta", wrong)
    page.wait_text("#state", "Connection lost: the feed speaks of node 1000000")
    page.wait_text("#state", "Live")
    page.wait_text(".source-head", f"{len(cache.nodes)} prefixes")
    server.send("error", {"message": "no replica is left", "code": 503})
    page.wait_text("#state", "Connection lost: no replica is left")
    page.wait_text("#state", "Live")
    # the same where it is seen later
    page.press(" ")
    page.wait_text("#state", "Paused")
    asked = len(server.requests)
    server.send("delta", wrong)
    page.wait("Number(document.querySelector('#time').max) > "
              "Number(document.querySelector('#time').value)")  # fmt: skip
    page.press(" ")
    wait_for(lambda: ("GET", "forest/events?texts=1", None) in server.requests[asked:])
    page.wait_text("#state", "Live")
    page.wait_text(".source-head", f"{len(cache.nodes)} prefixes")


def test_a_server_without_a_page_says_what_to_do(tab: Tab, server: FeedServer) -> None:
    server.refusal = (404, "this server has no live page: start it with relay.page=true")
    tab.open(server.address)
    tab.wait_text("#empty", "start it with relay.page=true")
    assert all("404" in said for said in tab.messages)
    tab.messages.clear()


def test_an_empty_cache_says_what_to_do(
    tab: Tab, serve: Callable[..., FeedServer], cache: SimulatedCache
) -> None:
    server = serve(("hello", hello()), ("snapshot", EMPTY))
    tab.open(server.address)
    tab.wait_text("#empty", "Nothing is cached yet")
    assert "first block of 16 tokens" in tab.text("#empty")
    assert "/v1/completions" in tab.text("#empty pre")
    assert "Qwen/Qwen3-8B" in tab.text("#empty pre")
    server.files["demo.jsonl"] = "\n".join(
        json.dumps({"t": 0, "event": event, "data": data})
        for event, data in (("hello", hello("recorded")), ("snapshot", cache.snapshot()))
    )
    tab.click("#empty a")
    tab.wait_text(".source-head", "recorded")


def test_a_recording_is_replayed(tab: Tab, server: FeedServer, cache: SimulatedCache) -> None:
    first = cache.snapshot()
    events = [(0.0, "hello", hello("recorded")), (0.0, "snapshot", first)]
    last = first
    for place in range(4):
        delta = cache.delta(arrivals=8)
        last = apply(last, delta)
        events.append((0.1 * place + 0.1, "delta", delta))
    lines = [json.dumps({"t": t, "event": event, "data": data}) for t, event, data in events]
    server.files["run.jsonl"] = "\n".join(lines)
    tab.open(f"{server.address}?replay=static/run.jsonl")
    tab.wait_text("#clock", "0:00 / 0:00")
    tab.wait_text(".source-head", "recorded")
    tab.wait_text("#state", "Recording")  # it has come to its end
    tab.wait_text(".source-head", f"{len(last['nodes'])} prefixes")
    tab.press(",")
    tab.press(" ")
    tab.wait_text("#pause", "Go on")
    assert not any(path.startswith(("forest", "pins")) for _, path, _ in server.requests)
    server.files["broken.jsonl"] = lines[0] + "\n{"
    tab.open(f"{server.address}?replay=static/broken.jsonl")
    tab.wait_text("#empty", "static/broken.jsonl, line 2")
    tab.open(f"{server.address}?replay=https://example.com/run.jsonl")
    tab.wait_text("#empty", "expected a file of this server")


def test_hidden_texts_are_not_asked_for(page: Tab, server: FeedServer) -> None:
    assert ("GET", "forest/events?texts=1", None) in server.requests
    select_first(page)
    text = page.text("#node blockquote")
    assert text
    page.press("t")
    wait_for(lambda: ("GET", "forest/events", None) in server.requests)
    page.wait("document.querySelector('#node blockquote').hidden")
    page.wait_text("#state", "Live")
    assert text[:30] not in page.text("body")


def test_texts_are_shown_and_nothing_else(tab: Tab, serve: Callable[..., FeedServer]) -> None:
    """They are what anybody may send."""
    markup = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    cache = SimulatedCache(nodes=9)
    for node in cache.nodes.values():
        node["text"] = markup
        node["module"] = markup
        node["hits"] = 1
        node["requests"] = [markup]
    server = serve(("hello", {**hello(markup), "model": markup}), ("snapshot", cache.snapshot()))
    tab.open(server.address)
    tab.wait_text("#columns", "prefixes")
    select_first(tab)
    tab.press("ArrowRight")
    assert tab.text("#node blockquote") == markup
    assert tab.text("#tip p") == markup
    assert tab.evaluate("document.title") != "owned"
    assert tab.evaluate("document.querySelectorAll('img, body script').length") == 0

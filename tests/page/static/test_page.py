# SPDX-License-Identifier: Apache-2.0
"""The page in a browser, as a user has it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.page.static.browser import Tab
from tests.page.static.selected import facts, select_first, selected
from tests.page.static.server import FeedServer, pin_of
from tests.page.static.simulated import SimulatedCache, apply, hello
from tests.support.waiting import wait_for


def node_named(cache: SimulatedCache, **fields: Any) -> dict[str, Any]:
    return next(
        node for node in cache.nodes.values() if all(node[n] == v for n, v in fields.items())
    )


def test_a_snapshot_is_shown_as_it_was_told(page: Tab, cache: SimulatedCache) -> None:
    stats = cache.stats()
    tokens = sum(node["tokens"] for node in cache.nodes.values())
    heads = page.text(".source-head")
    assert f"{len(cache.nodes)} prefixes" in heads
    assert f"{tokens / 1000:.1f}".removesuffix(".0") + "K tokens" in heads
    assert page.text("#model") == "Qwen/Qwen3-8B"
    assert page.text("#state") == "Live"
    hit_rate = stats["prefix_hit_tokens"] / stats["prefix_query_tokens"]
    assert page.text("#hit-rate") == f"{100 * hit_rate:.1f} %"
    assert page.text("#waiting") == "5"
    assert page.text("#reasons") == "3 for a shared prefix · 2 for room"
    for kind in ("pinned", "modules"):
        assert f"{stats['memory_blocks'][kind]} {kind}" in page.text("#kinds")
    worth = max(cache.nodes.values(), key=lambda node: node["hits"] * node["tokens"])
    assert (worth["module"] or worth["text"][:60]) in page.text(".rows li")


def test_a_prefix_that_is_clicked_says_all_of_itself(page: Tab, cache: SimulatedCache) -> None:
    """Where it is on the canvas is worked out here: roots share the width by tokens."""
    below: dict[int | None, list[dict]] = {}
    for node in cache.nodes.values():
        below.setdefault(node["parent"], []).append(node)

    def width(node: dict) -> int:
        return node["tokens"] + sum(map(width, below.get(node["id"], [])))

    roots = sorted(below[None], key=lambda node: node["id"])
    total = sum(map(width, roots))
    begins = 0
    box = page.evaluate(
        "(() => { const { left, top, width } = document.querySelector('canvas')"
        ".getBoundingClientRect(); return [left, top, width]; })()"
    )
    for root in roots[:3]:
        middle = (begins + width(root) / 2) / total
        begins += width(root)
        page.move_to(box[0] + middle * box[2], box[1] + 10)
        assert root["text"][:40] in page.text("#tip")
        page.click_at(box[0] + middle * box[2], box[1] + 10)
        page.wait(f"document.querySelector('#node').dataset.node === '{root['id']}'")
        found = facts(page)
        assert found["Tokens"] == f"{root['tokens']:,}"
        assert found["From the beginning"] == f"{root['tokens']:,} tokens"
        assert found["Blocks"] == str(root["blocks"])
        assert found["Hits"].startswith(str(root["hits"]) if root["hits"] else "none")
        assert found["Leaves"].startswith("never" if root["pinned_tokens"] else "not soon")
        assert page.text("#node blockquote") == root["text"]
        assert page.evaluate("document.querySelector('#node').ariaLive") == "polite"
    page.click_at(box[0] + box[2] / 2, box[1] + 10, clicks=2)
    page.wait("!document.querySelector('.source-head button').hidden")


def test_deltas_change_what_is_shown(page: Tab, cache: SimulatedCache, server: FeedServer) -> None:
    first = select_first(page)
    state = cache.snapshot()
    for _ in range(12):
        delta = cache.delta(arrivals=8)
        state = apply(state, delta)
        server.send("delta", delta)
    attended = state["stats"]["kv_tokens_logical"]
    page.wait(f"document.querySelector('#attended').title === '{attended:,}'")
    running = state["stats"]["running"]
    page.wait(f"document.querySelector('#running').innerText === '{running}'")
    node = next(node for node in state["nodes"] if node["id"] == first)
    page.wait_text("#node dl", f"{node['running']} request")
    assert facts(page)["Requests"].splitlines() == node["requests"]
    together = f"by {node['shared']} requests" if node["shared"] else "no"
    assert facts(page)["Read together"] == together
    assert f"{len(state['nodes'])} prefixes" in page.text(".source-head")
    page.click("[data-list=leaving]")
    leaves = next(node for node in state["nodes"] if node["next_out"] == 0)
    page.wait_text(".rows li", leaves["text"][:60])


def test_a_pin_that_ends_inside_a_prefix_marks_its_part(
    page: Tab, cache: SimulatedCache, server: FeedServer
) -> None:
    first = select_first(page)
    tokens = cache.nodes[first]["tokens"]
    pixel = (
        "(() => { const copy = new OffscreenCanvas(1, 1).getContext('2d');"
        "copy.drawImage(document.querySelector('canvas'), -3, -HEIGHT);"
        "return copy.getImageData(0, 0, 1, 1).data.join(); })()"
    )
    high, low = pixel.replace("HEIGHT", "6"), pixel.replace("HEIGHT", "60")
    for part, relation, said in ((tokens, "===", "all of it"), (tokens // 2, "!==", "its first")):
        change = {"added": [], "removed": [], "changed": [{"id": first, "pinned_tokens": part}]}
        server.send("delta", {**cache.delta(arrivals=0), **change})
        page.wait_text("#node dl", said)
        page.wait(f"{high} {relation} {low}")
    page.wait_text("#node dl", f"its first {tokens // 2:,} tokens")


def test_buttons_ask_the_server(page: Tab, cache: SimulatedCache, server: FeedServer) -> None:
    node = node_named(cache, parent=None, pinned_tokens=0)

    def change(**fields: Any) -> None:
        delta = {**cache.delta(arrivals=0), "added": [], "removed": []}
        server.send("delta", {**delta, "changed": [{"id": node["id"], **fields}]})

    def asked(method: str, path: str) -> Any:
        return wait_for(
            lambda: [body or True for m, p, body in server.requests if (m, p) == (method, path)]
        )

    page.press("ArrowDown")
    while page.evaluate("1") and selected(page) != str(node["id"]):
        page.press("ArrowRight")
        page.press("Enter")
        page.evaluate("new Promise(requestAnimationFrame)")
    page.press("p")
    assert asked("POST", "pins") == [{"source": "0", "node": node["id"]}]
    page.wait_text("#node .said", "Pinned as pin-0: 4 blocks stay.")
    change(pinned_tokens=node["tokens"])
    page.wait_text("#node .actions", "Unpin")
    page.press("p")
    asked("DELETE", "pins/pin-0")
    page.wait_text("#node .said", "Unpinned pin-0.")
    change(pinned_tokens=0)
    page.wait("!document.querySelectorAll('#node .actions button')[1].disabled")
    page.press("e")
    assert asked("POST", "forest/evict") == [{"source": "0", "node": node["id"]}]
    page.wait_text("#node .said", "Evicted 3 blocks.")
    others = {**cache.delta(arrivals=0), "added": [], "changed": []}
    server.send("delta", {**others, "removed": branch(cache, node["id"])})
    page.wait_text("#node h2", "No prefix selected")
    assert page.text("#node .said") == "Evicted 3 blocks."


def branch(cache: SimulatedCache, i: int) -> list[int]:
    """A prefix and all that continues it."""
    return [i, *(below for child in cache.children[i] for below in branch(cache, child))]


def test_refusals_of_the_server_are_shown(page: Tab, server: FeedServer) -> None:
    select_first(page)
    page.press("ArrowRight")
    page.press("Enter")
    page.wait("!document.querySelectorAll('#node .actions button')[1].disabled")
    server.evict_refusal = "requests use 4 of these 9 blocks: wait until they have ended"
    page.press("e")
    page.wait_text("#node .said.bad", server.evict_refusal)
    wait_for(lambda: page.evaluate("1") and any("409" in said for said in page.messages))
    page.messages.clear()  # the browser tells of every status that says no


def test_pins_of_the_server_can_be_taken_back(
    tab: Tab, server: FeedServer, cache: SimulatedCache
) -> None:
    server.pins = [pin_of("rules"), pin_of("glossary")]
    tab.open(server.address)
    tab.click("[data-list=kept]")
    tab.wait_text("#lists", "glossary")
    tab.evaluate("[...document.querySelectorAll('#lists .small')][1].click()")
    wait_for(lambda: [pin["id"] for pin in server.pins] == ["rules"])
    tab.wait("!document.querySelector('#lists').innerText.includes('glossary')")


def test_keys_walk_the_forest(page: Tab, cache: SimulatedCache) -> None:
    roots = sorted(i for i, node in cache.nodes.items() if node["parent"] is None)
    assert select_first(page) == roots[0]

    def walked(*keys: str) -> int:
        for key in (*keys, "Enter"):
            page.press(key)
        page.evaluate("new Promise(requestAnimationFrame)")
        return int(selected(page))

    assert walked("ArrowRight") == roots[1]
    assert walked("ArrowRight", "ArrowLeft") == roots[1]
    child = min(cache.children[roots[1]])
    assert walked("ArrowDown") == child
    assert walked("ArrowUp", "ArrowLeft") == roots[0]
    assert walked("ArrowLeft") == roots[0]
    page.press("z")
    page.wait("!document.querySelector('.source-head button').hidden")
    page.press("Escape")
    page.wait("document.querySelector('.source-head button').hidden")
    page.press("Escape")
    page.wait("document.querySelector('#node').dataset.node === ''")
    page.press("?")
    page.wait("document.querySelector('#help-dialog').open")
    page.press(" ")  # is the dialog's
    assert page.text("#state") == "Live"


def test_time_can_be_stopped_and_gone_back_in(
    page: Tab, cache: SimulatedCache, server: FeedServer
) -> None:
    states = [cache.snapshot()]

    def tell() -> None:
        delta = cache.delta(arrivals=8)
        states.append(apply(states[-1], delta))
        server.send("delta", delta)

    def shows(state: dict[str, Any]) -> None:
        page.wait_text(".source-head", f"{len(state['nodes'])} prefixes")
        page.wait_text(".source-head", f"{state['stats']['running']} running")

    tell()
    shows(states[1])
    page.press(" ")
    page.wait_text("#state", "Paused")
    for _ in range(3):
        tell()
    page.wait(f"Number(document.querySelector('#time').max) >= {states[-1]['time_s']}")
    shows(states[1])
    select_first(page)
    assert page.evaluate("document.querySelector('#node .actions button').disabled")
    page.press(",")
    shows(states[0])
    for state in states[1:4]:
        page.press(".")
        shows(state)
    page.evaluate(
        "(() => { const time = document.querySelector('#time'); time.value = time.min;"
        "time.dispatchEvent(new Event('input')); })()"
    )
    shows(states[0])
    assert page.text("#clock").startswith("−")
    page.press("Home")
    page.wait_text("#state", "Live")
    shows(states[-1])


def test_sources_are_side_by_side_until_they_are_gone(
    tab: Tab, serve: Callable[..., FeedServer]
) -> None:
    caches = [SimulatedCache(nodes=40, seed=seed) for seed in range(3)]
    snapshots = [("snapshot", cache.snapshot(str(i))) for i, cache in enumerate(caches)]
    server = serve(("hello", hello("replica A", "replica B", "replica C")), *snapshots)
    tab.open(server.address)
    tab.wait("document.querySelectorAll('.source:not([hidden])').length === 3")
    tops = tab.evaluate("[...document.querySelectorAll('.source')].map((s) => s.offsetTop)")
    assert len(set(tops)) == 1
    total = sum(cache.stats()["memory_blocks"]["total"] for cache in caches)
    tab.wait_text("#total", f"of {total:,} blocks")
    second = "document.querySelectorAll('.source')[1]"
    server.send("gone", {"source": "1"})
    tab.wait(f"{second}.innerText.includes('has ended')")
    tab.press(",")  # before it was gone
    tab.wait(f"{second}.innerText.includes('prefixes')")
    tab.press("Home")
    # in its place there is another one, and a minute later nothing else
    names = [(str(i), f"replica {'ABCD'[i]}") for i in (0, 2, 3)]
    named = {**hello(), "sources": [{"id": i, "name": name} for i, name in names]}
    server.send("hello", named)
    server.send("snapshot", SimulatedCache(nodes=40, seed=3).snapshot("3"))
    tab.wait("document.querySelectorAll('.source:not([hidden])').length === 4")
    tab.evaluate("(() => { const now = Date.now; Date.now = () => now() + 61000; })()")
    server.send("delta", caches[0].delta(arrivals=1))
    tab.wait("document.querySelectorAll('.source:not([hidden])').length === 3")
    assert "replica B" not in tab.text("#columns") and "replica D" in tab.text("#columns")


def test_light_and_dark(page: Tab) -> None:
    pixel = (
        "(() => { const copy = new OffscreenCanvas(1, 1).getContext('2d');"
        "copy.drawImage(document.querySelector('canvas'), -9, -9);"
        "return [...copy.getImageData(0, 0, 1, 1).data]; })()"
    )
    ground = "getComputedStyle(document.documentElement).backgroundColor"

    def shows(theme: str) -> None:
        page.wait(f"Number({ground}.match(/\\d+/)[0]) {'<' if theme == 'dark' else '>'} 128")

    page.prefer("light")
    shows("light")
    light = page.evaluate(pixel)
    page.prefer("dark")
    shows("dark")
    page.wait(f"JSON.stringify({pixel}) !== '{json.dumps(light, separators=(',', ':'))}'")
    page.press("d")
    shows("light")
    page.press("d")
    shows("dark")
    page.evaluate("location.reload()")
    page.wait_text("#theme", "dark")


@pytest.mark.parametrize("sources", [1, 8])
def test_it_fits_phones_and_walls(tab: Tab, serve: Callable[..., FeedServer], sources: int) -> None:
    snapshots = [("snapshot", SimulatedCache(nodes=20).snapshot(str(i))) for i in range(sources)]
    server = serve(("hello", hello(*map(str, range(sources)))), *snapshots)
    tab.open(server.address)
    for width, height in ((375, 812), (1280, 800), (3840, 2160)):
        tab.resize(width, height)
        tab.wait(f"innerWidth === {width} && document.querySelectorAll('.source').length > 0")
        tab.evaluate("new Promise(requestAnimationFrame)")
        assert tab.evaluate("document.documentElement.scrollWidth") == width
        sizes = "[...document.querySelectorAll('.source canvas')].map((c) => c.clientHeight)"
        assert min(tab.evaluate(sizes)) > 100
        assert (
            tab.evaluate("document.querySelector('#pause').getBoundingClientRect().bottom")
            <= height
        )

# SPDX-License-Identifier: Apache-2.0
"""What the page makes of the feed before any of it is drawn."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.page.static.browser import PageError, Tab
from tests.page.static.server import STATIC, FeedServer, encoded
from tests.page.static.simulated import SimulatedCache, apply

_HELPERS = """
const { Forest } = await import("./static/data/forest.js");
const { Timeline, summarize } = await import("./static/data/timeline.js");
const { eventsOf } = await import("./static/data/feed.js");
const told = (forest) => ({
  nodes: [...forest.nodes.values()].map((node) => node.fields()).sort((a, b) => a.id - b.id),
  stats: forest.stats, time_s: forest.time_s,
});
"""


@pytest.fixture(scope="module")
def run(chromium: Tab) -> Iterator[Callable[[str, Any], Any]]:
    """What a piece of code returns, with the page's modules and `given`."""

    def run(code: str, given: Any) -> Any:
        return chromium.evaluate(f"(async (given) => {{{_HELPERS}{code}}})({json.dumps(given)})")

    with FeedServer(lambda texts: []).running() as server:
        chromium.open(server.address)
        yield run


def told(snapshot: dict[str, Any]) -> dict[str, Any]:
    nodes = sorted(snapshot["nodes"], key=lambda node: node["id"])
    return {"nodes": nodes, "stats": snapshot["stats"], "time_s": snapshot["time_s"]}


def some_deltas(cache: SimulatedCache, count: int) -> list[dict[str, Any]]:
    return [cache.delta(seconds=0.5, arrivals=8) for _ in range(count)]


@pytest.mark.parametrize("seed", range(3))
def test_deltas_lead_to_what_a_snapshot_says_and_back_again(
    run: Callable[[str, Any], Any], seed: int
) -> None:
    cache = SimulatedCache(nodes=80, seed=seed)
    states, deltas = [cache.snapshot()], []
    for _ in range(25):
        deltas.append(cache.delta(arrivals=8))
        states.append(apply(states[-1], deltas[-1]))
    assert told(states[-1]) == told(cache.snapshot())
    assert any(delta["removed"] for delta in deltas)
    changes = [change for delta in deltas for change in delta["changed"]]
    added = {node["id"] for delta in deltas for node in delta["added"]}
    moved = [change["parent"] in added for change in changes if "parent" in change]
    assert set(moved) == {True, False}  # some were split, some were joined
    there, back = run(
        """
        const forest = new Forest("0", "rank 0");
        forest.apply({ event: "snapshot", data: given[0] });
        const there = [told(forest)];
        const undo = [];
        for (const data of given.slice(1)) {
          undo.push(forest.apply({ event: "delta", data }));
          there.push(told(forest));
        }
        const back = [told(forest)];
        while (undo.length) {
          forest.apply(undo.pop());
          back.push(told(forest));
        }
        return [there, back.reverse()];
        """,
        [states[0], *deltas],
    )
    expected = [told(state) for state in states]
    assert there == expected
    assert back == expected


def test_widths_are_tokens_of_a_prefix_and_all_that_continues_it(
    run: Callable[[str, Any], Any],
) -> None:
    cache = SimulatedCache(nodes=80, seed=5)
    some_deltas(cache, 10)
    snapshot = cache.snapshot()
    laid, total = run(
        """
        const forest = new Forest("0", "rank 0");
        forest.apply({ event: "snapshot", data: given });
        const { total } = forest.layOut();
        const place = ({ id, start, width, depth }) => [id, [start, width, depth]];
        return [[...forest.nodes.values()].map(place), total];
        """,
        snapshot,
    )
    nodes = {node["id"]: node for node in snapshot["nodes"]}

    def width(i: int) -> int:
        below = [child["id"] for child in nodes.values() if child["parent"] == i]
        return nodes[i]["tokens"] + sum(map(width, below))

    def depth(i: int) -> int:
        return 0 if nodes[i]["parent"] is None else depth(nodes[i]["parent"]) + 1

    def start(i: int) -> int:
        parent = nodes[i]["parent"]
        before = [n["id"] for n in nodes.values() if n["parent"] == parent and n["id"] < i]
        return (0 if parent is None else start(parent)) + sum(map(width, before))

    assert dict(laid) == {i: [start(i), width(i), depth(i)] for i in nodes}
    assert total == sum(width(i) for i in nodes if nodes[i]["parent"] is None)


@pytest.mark.parametrize(
    ("delta", "message"),
    [
        ({"changed": [{"id": 999, "hits": 1}]}, "speaks of node 999"),
        ({"removed": [999]}, "speaks of node 999"),
        ({"added": [{"id": 2, "parent": 999, "tokens": 1}]}, "speaks of node 999"),
        ({"added": [{"id": 1, "parent": None, "tokens": 1}]}, "node 1 was added twice"),
        ({"removed": [1]}, "node 1 was removed, and its children were not"),
        ({"changed": [{"id": 1, "parent": 2}]}, "below themselves"),
    ],
)
def test_deltas_that_do_not_fit_are_refused(
    run: Callable[[str, Any], Any], delta: dict[str, Any], message: str
) -> None:
    nodes = [{"id": 1, "parent": None, "tokens": 8}]
    if "added" not in delta:
        nodes.append({"id": 2, "parent": 1, "tokens": 8})
    with pytest.raises(PageError, match=message):
        run(
            """
            const forest = new Forest("0", "rank 0");
            forest.apply({ event: "snapshot", data: { nodes: given[0], stats: null, time_s: 0 } });
            forest.apply({ event: "delta", data: { stats: null, time_s: 1, ...given[1] } });
            forest.layOut();
            """,
            [nodes, delta],
        )


def test_the_timeline_shows_any_moment_that_it_keeps(run: Callable[[str, Any], Any]) -> None:
    cache = SimulatedCache(nodes=60)
    states = [cache.snapshot()]
    deltas = some_deltas(cache, 20)
    for delta in deltas:
        states.append(apply(states[-1], delta))
    order = random.Random(1).sample(range(21), 21)
    shown = run(
        """
        const timeline = new Timeline();
        const [first, ...deltas] = given.events;
        timeline.push(0, "snapshot", first);
        deltas.forEach((data, place) => timeline.push(place + 1, "delta", data));
        timeline.pause();
        const shown = given.order.map((t) => {
          timeline.seek(t + 0.5);
          return told(timeline.forests.get("0"));
        });
        timeline.follow();
        return [...shown, told(timeline.forests.get("0"))];
        """,
        {"events": [states[0], *deltas], "order": order},
    )
    assert shown == [told(states[t]) for t in [*order, 20]]


@pytest.mark.parametrize("paused", [False, True])
def test_the_timeline_is_bounded(run: Callable[[str, Any], Any], paused: bool) -> None:
    cache = SimulatedCache(nodes=60)
    first = cache.snapshot()
    deltas = some_deltas(cache, 120)
    by_time, by_records, last = run(
        """
        const kept = ([kept_s, records]) => {
          const timeline = new Timeline(kept_s, records);
          timeline.push(0, "snapshot", given.first);
          if (given.paused) timeline.pause();
          let most = 0;
          given.deltas.forEach((data, place) => {
            timeline.push(place + 1, "delta", data);
            most = Math.max(most, timeline.records);
          });
          const { oldest_s, newest_s, shown_s } = timeline;
          timeline.follow();
          return [{ oldest_s, newest_s, shown_s, most }, told(timeline.forests.get("0"))];
        };
        const [byTime, last] = kept([10, 1e9]);
        return [byTime, kept([1e9, 500])[0], last];
        """,
        {"first": first, "deltas": deltas, "paused": paused},
    )
    assert by_time["oldest_s"] == 110
    assert by_records["most"] <= 500
    assert by_records["oldest_s"] > 0
    for kept in (by_time, by_records):
        assert kept["newest_s"] == 120
        # what stands still moves on with what is forgotten
        assert kept["shown_s"] == (kept["oldest_s"] if paused else 120)
    assert last == told(cache.snapshot())


def test_figures_are_those_of_all_sources(run: Callable[[str, Any], Any]) -> None:
    one, other = SimulatedCache(nodes=40).stats(), SimulatedCache(nodes=90, seed=1).stats()
    other["prefix_query_tokens"] *= 7
    other["long_context_bytes"] = 5000
    found = run("return summarize([...given, null]);", [one, other])
    assert found["memory"] == {
        kind: one["memory_blocks"][kind] + other["memory_blocks"][kind]
        for kind in one["memory_blocks"]
    }
    assert found["hits"] == one["prefix_hit_tokens"] + other["prefix_hit_tokens"]
    assert found["queries"] == one["prefix_query_tokens"] + other["prefix_query_tokens"]
    assert found["longContextBytes"] == 5000
    assert found["waiting"] == {"capacity": 4, "prefix": 6}


@pytest.mark.parametrize("seed", range(3))
def test_events_are_read_however_they_are_cut(run: Callable[[str, Any], Any], seed: int) -> None:
    cut = random.Random(seed)
    events = [("hello", {"a": "é\n€ 𝄞"}), ("snapshot", {"nodes": list(range(50))}), ("gone", {})]
    sent = b": keep-alive\n\n" + b"".join(encoded(*event) for event in events)
    if seed == 1:
        sent = sent.replace(b"\n", b"\r\n")
    places = sorted(cut.randrange(len(sent)) for _ in range(30))
    parts = [list(sent[a:b]) for a, b in zip([0, *places], [*places, len(sent)], strict=True)]
    read = run(
        """
        const body = new ReadableStream({
          start(controller) {
            for (const part of given) controller.enqueue(new Uint8Array(part));
            controller.close();
          },
        });
        const read = [];
        for await (const event of eventsOf(body)) read.push(event);
        return read;
        """,
        parts,
    )
    assert read == [None, *({"event": name, "data": data} for name, data in events)]


def test_the_files_name_no_other_host() -> None:
    for file in STATIC.rglob("*"):
        if file.suffix in {".html", ".css", ".js"}:
            named = re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]+", file.read_text())
            assert set(named) <= {"http://www.w3.org"}, file

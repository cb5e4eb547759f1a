# SPDX-License-Identifier: Apache-2.0
"""The forest as front ends were told of it, against one that is built anew each time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.depth import cases
from vllm_relay.page.blocks import NO_KEY, ToldBlock, pack, unpack
from vllm_relay.page.forest import MAX_REQUESTS, Forest
from vllm_relay.page.leaving import first_to_leave, number

BLOCK_SIZE = 16
MAX_KEY = 16
BRANCHES = {5: 2, 9: 4, 13: 4}


@dataclass
class Cache:
    """What is in the KV blocks of an engine: a key says what is in it and all before it."""

    at: dict[int, tuple[int, int, float]] = field(default_factory=dict)
    """By block id: key, hits, used_s."""
    modules: dict[int, str] = field(default_factory=dict)
    """By key."""
    pinned: set[int] = field(default_factory=set)
    running: list[tuple[str, list[int]]] = field(default_factory=list)

    def told(self, block_id: int) -> ToldBlock:
        key, hits, used_s = self.at.get(block_id, (NO_KEY, 0, 0.0))
        return ToldBlock(block_id, hits, key, self.parent(key), used_s)

    def parent(self, key: int) -> int:
        """Runs of four keys, of which some continue others; those of modules are roots."""
        before = BRANCHES.get(key, NO_KEY) if key % 4 == 1 or key == NO_KEY else key - 1
        if key in self.modules and self.modules.get(before) != self.modules[key]:
            return NO_KEY
        return before

    def keys(self) -> set[int]:
        return {key for key, _, _ in self.at.values()}

    def runs(self) -> dict[int, dict[str, Any]]:
        """By the last key of a node: all that is said of it but its number and its times."""
        keys = self.keys()
        children = {key: [k for k in keys if self.parent(k) == key] for key in keys}

        def goes_on(key: int) -> bool:
            following = children[key]
            return len(following) == 1 and self.modules.get(following[0]) == self.modules.get(key)

        runs = {}
        for last in (key for key in keys if not goes_on(key)):
            run = [last]
            while (before := self.parent(run[0])) in keys and goes_on(before):
                run.insert(0, before)
            parent = self.parent(run[0])
            requests = [name for name, ends in self.running if self._passes(ends, last, keys)]
            held = {self.at[block_id][0] for block_id in self.pinned & self.at.keys()}
            unheld = (place for place, key in enumerate(run) if key not in held)
            runs[last] = {
                "parent": parent if parent in keys else None,
                "tokens": len(run) * BLOCK_SIZE,
                "blocks": len(run),
                "hits": self._hits_from(run[0], children),
                "running": len(requests),
                "shared": len(requests) if len(requests) > 1 else 0,
                "requests": requests[:MAX_REQUESTS],
                "pinned_tokens": next(unheld, len(run)) * BLOCK_SIZE,
                "module": self.modules.get(last),
            }
        return runs

    def _hits_from(self, key: int, children: dict[int, list[int]]) -> int:
        own = sum(hits for each, hits, _ in self.at.values() if each == key)
        return own + sum(self._hits_from(child, children) for child in children[key])

    def _passes(self, ends: list[int], last: int, keys: set[int]) -> bool:
        """Whether a request runs through the node that ends with a key."""
        behind = {last}
        while more := {key for key in keys if self.parent(key) in behind} - behind:
            behind |= more
        run = {last}
        children = {key: [k for k in keys if self.parent(k) == key] for key in keys}
        key = last
        while (before := self.parent(key)) in keys and len(children[before]) == 1:
            if self.modules.get(before) != self.modules.get(key):
                break
            run.add(before)
            key = before
        return bool((behind | run) & set(ends))


def nodes_of(forest: Forest, cache: Cache) -> dict[int, dict[str, Any]]:
    """What a forest says of its nodes, in the form of `Cache.runs`."""
    last = {node.id: node.blocks[-1].key for node in forest.nodes.values()}
    found = {}
    for told in forest.told():
        told = dict(told)
        if told["parent"] is not None:
            told["parent"] = last[told["parent"]]
        key = last[told.pop("id")]
        found[key] = {name: told[name] for name in told if name in _COMPARED}
    return found


_COMPARED = (
    "parent",
    "tokens",
    "blocks",
    "hits",
    "running",
    "shared",
    "requests",
    "pinned_tokens",
    "module",
)


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[str, Any]]:
    block = st.integers(1, 20)
    put = st.tuples(block, st.integers(1, MAX_KEY), st.integers(0, 3), st.floats(1, 9))
    full = [(key, key, key % 3, 1.0) for key in range(1, MAX_KEY + 1)]
    ends = st.lists(st.integers(1, MAX_KEY), min_size=1, max_size=2)
    step = st.one_of(
        st.tuples(st.just("put"), st.permutations(full)),
        st.tuples(st.just("put"), st.lists(put, max_size=6)),
        st.tuples(st.just("drop"), st.lists(block, max_size=4)),
        st.tuples(st.just("pin"), st.sets(block, max_size=3)),
        st.tuples(st.just("run"), st.lists(ends, max_size=10)),
    )
    return draw(st.lists(step, min_size=1, max_size=12))


@settings(max_examples=cases(100), deadline=None)
@given(steps(), st.dictionaries(st.integers(2, MAX_KEY), st.sampled_from("ab"), max_size=4))
def test_changes_lead_where_all_told_anew_would(
    given_steps: list[tuple[str, Any]], modules: dict[int, str]
) -> None:
    cache, forest = Cache(modules=modules), Forest(BLOCK_SIZE, shares=True)
    seen: dict[int, dict[str, Any]] = {}
    for kind, what in given_steps:
        changed: list[int] = []
        if kind == "put":
            for block_id, key, hits, used_s in what:
                cache.at[block_id] = (key, hits, used_s)
                changed.append(block_id)
        elif kind == "drop":
            for block_id in what:
                cache.at.pop(block_id, None)
                changed.append(block_id)
        elif kind == "pin":
            cache.pinned = what
        else:
            cache.running = [(f"r{place}", ends) for place, ends in enumerate(what)]
        told = unpack(b"".join(pack(*cache.told(each)) for each in dict.fromkeys(changed)))
        names = {i: modules[cache.at[i][0]] for i in changed if cache.at.get(i, (0,))[0] in modules}
        forest.apply(told, names)
        forest.pin(cache.pinned)
        there = cache.keys()
        forest.run([(n, [e for e in ends if e in there]) for n, ends in cache.running], 10.0)
        number(forest)
        _follow(seen, forest.take_changes())
        assert sorted(seen.values(), key=_id) == sorted(forest.told(), key=_id)
        assert nodes_of(forest, cache) == cache.runs()
        assert len(forest) == len(cache.keys())
    assert forest.take_changes() == {"added": [], "changed": [], "removed": []}


def _id(node: dict[str, Any]) -> int:
    return node["id"]


def _follow(seen: dict[int, dict[str, Any]], changes: dict[str, Any]) -> None:
    """As a page does."""
    for number_ in changes["removed"]:
        del seen[number_]
    for node in changes["added"]:
        assert node["id"] not in seen
        seen[node["id"]] = node
    for change in changes["changed"]:
        assert len(change) > 1 and any(seen[change["id"]][k] != change[k] for k in change)
        seen[change["id"]] = seen[change["id"]] | change


def _told(block_id: int, key: int, parent: int, used_s: float, hits: int = 0) -> ToldBlock:
    return ToldBlock(block_id, hits, key, parent, used_s)


def test_a_node_keeps_its_number_while_it_grows_is_split_and_joined() -> None:
    forest = Forest(BLOCK_SIZE)
    forest.apply([_told(1, 10, NO_KEY, 1.0), _told(2, 11, 10, 1.0)], {})
    [first] = forest.take_changes()["added"]
    forest.apply([_told(3, 12, 11, 2.0)], {})
    [grown] = forest.take_changes()["changed"]
    assert grown == {"id": first["id"], "tokens": 48, "blocks": 3, "last_used_s": 2.0}
    forest.apply([_told(4, 20, 11, 3.0)], {})  # branches behind the second block
    changes = forest.take_changes()
    assert [each["parent"] for each in changes["added"]] == [first["id"]] * 2
    assert [(each["id"], each["blocks"]) for each in changes["changed"]] == [(first["id"], 2)]
    forest.apply([_told(4, NO_KEY, NO_KEY, 0.0)], {})
    changes = forest.take_changes()
    assert len(changes["removed"]) == 2
    assert [(each["id"], each["blocks"]) for each in changes["changed"]] == [(first["id"], 3)]


def test_what_leaves_first() -> None:
    """Leaves by their last use, kept ones behind, and parents when nothing continues them."""
    forest = Forest(BLOCK_SIZE)
    told = [
        _told(1, 10, NO_KEY, 1.0),
        _told(2, 20, 10, 5.0),
        _told(3, 21, 10, 3.0),
        _told(4, 30, NO_KEY, 4.0),
        _told(5, 40, NO_KEY, 2.0),
        _told(6, 50, NO_KEY, 0.5),
    ]
    forest.apply(told, {})
    forest.pin([6])
    by_key = {node.blocks[-1].key: node for node in forest.nodes.values()}
    by_key[40].kept = 1
    assert [each.blocks[-1].key for each in first_to_leave(forest)] == [21, 30, 20, 10, 40]
    forest.run([("r", [30])], 6.0)
    assert [each.blocks[-1].key for each in first_to_leave(forest)] == [21, 20, 10, 40]
    number(forest)
    places = {each["last_used_s"]: each["next_out"] for each in _snapshot(forest)}
    assert places == {3.0: 0, 5.0: 2, 2.0: 3, 6.0: None, 0.5: None} | {5.0: places[5.0]}


def _snapshot(forest: Forest) -> list[dict[str, Any]]:
    forest.take_changes()
    return forest.told()

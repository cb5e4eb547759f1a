# SPDX-License-Identifier: Apache-2.0
"""Files whose checksums are right and whose arrays no index has: a file may come from anybody."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.sparse.key_sets import key_set
from vllm_relay.sparse.files.section_file import SectionFile, write_sections
from vllm_relay.sparse.index.blocks import BlockIndex
from vllm_relay.sparse.index.coarse import CoarseIndex
from vllm_relay.sparse.index.compiled_index import CompiledIndex
from vllm_relay.sparse.index.elements import Elements
from vllm_relay.sparse.index.flat import FlatIndex
from vllm_relay.sparse.index.graph import HUBS, SPREAD, GraphIndex
from vllm_relay.sparse.index.key_index import IndexDamagedError
from vllm_relay.sparse.index.query_types import Dipr, QueryType, TopK
from vllm_relay.sparse.index.sparse_layer import SparseLayer

HEADS = key_set("outliers", 700, 64)
KINDS: dict[str, Callable[[], CompiledIndex]] = {
    "flat": FlatIndex,
    "coarse": CoarseIndex,
    "means": BlockIndex,
    "bounds": lambda: BlockIndex(representative="bounds", exact=True),
    "graph": GraphIndex,
}
QUERIES: tuple[QueryType, ...] = (
    TopK(9),
    TopK(300, width=100),
    Dipr(30.0),
    TopK(9, max_dropped_mass=0.01),
)
FAR = 2_000_000_000


def _set(name: str, place: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def forge(parts: dict[str, Any]) -> None:
        parts[name][place] = value

    return forge


def _replace(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    def forge(parts: dict[str, Any]) -> None:
        parts[name] = change(parts[name])

    return forge


ALL = slice(None)
EVERYWHERE: dict[str, Callable[[dict[str, Any]], None]] = {
    "keys that are NaN": _set("keys", ALL, np.nan),
    "a key that is infinite": _set("keys", (ALL, 3), np.inf),
    "mean that is NaN": _set("mean", 3, np.nan),
    "step of zero": _set("step", 0, 0),
    "negative step": _set("step", 0, -1),
    "infinite step": _set("step", 0, np.inf),
    "ids before the first": _set("outside", 0, -1),
    "ids behind the last": _set("outside", -1, 700),
    "ids in another order": _replace("outside", lambda ids: ids[::-1]),
    "ids twice": _replace("outside", lambda ids: np.repeat(ids, 2)),
    "no length": _replace("longest", lambda _: -1),
    "infinite length": _replace("longest", lambda _: 10**400),
    "an error of no size": _replace("longest_error", lambda _: 10**400),
}
OF_KIND: dict[str, dict[str, Callable[[dict[str, Any]], None]]] = {
    "graph": {
        "edges far behind": _set("graph", (ALL, slice(1, None)), FAR),
        "edges just behind": _set("graph", (ALL, 1), 700),
        "edges far before": _set("graph", (ALL, 1), -FAR),
        "edges just before": _set("graph", (ALL, 1), -1),
        "too many edges": _set("graph", (ALL, 0), max(SPREAD.row_slots, HUBS.row_slots)),
        "far too many edges": _set("graph", (ALL, 0), FAR),
        "a negative number of edges": _set("graph", (ALL, 0), -1),
        "no room for edges": _replace("graph", lambda graph: graph[:, :0]),
        "rows too few": _replace("graph", lambda graph: graph[:-1]),
        "entry behind": _set("entries", 0, 700),
        "entry before": _set("entries", 0, -1),
        "no entries": _replace("entries", lambda entries: entries[:0]),
        "width of zero": _replace("default_width", lambda _: 0),
        "width without end": _replace("default_width", lambda _: 10**400),
        "hubs without end": _replace("hub_statistic", lambda _: 10**400),
        "codes too short": _replace("codes", lambda codes: codes[:, :32]),
    },
    "coarse": {
        "ids far before": _set("ids", ALL, -FAR),
        "ids of no key": _set("ids", 0, -1),
        "ids behind": _set("ids", 0, 700),
        "a key in two lists": _set("ids", 0, 1),
        "another order": _replace("ids", lambda ids: ids[::-1]),
        "a list that begins behind": _set("starts", 1, FAR),
        "a list that begins before": _set("starts", 1, -1),
        "an empty list": _set("counts", 0, 0),
        "a list of negative size": _set("counts", 0, -5),
        "a list that is too long": _set("counts", 0, FAR),
        "no lists": _replace("counts", lambda counts: counts[:0]),
        "blocks too few": _replace("blocks", lambda blocks: blocks[:-1]),
        "centres too few": _replace("centres", lambda centres: centres[:-1]),
        "width above all lists": _replace("default_width", lambda _: 701),
    },
    "means": {
        "representatives too few": _replace("representatives", lambda each: each[:, :-1]),
        "block of no tokens": _replace("block_tokens", lambda _: 0),
        "smaller blocks": _replace("block_tokens", lambda _: 16),
        "far larger blocks": _replace("block_tokens", lambda _: 10**400),
        "bounds of means": _replace("representative", lambda _: "bounds"),
        "means that are exact": _replace("exact", lambda _: True),
        "width above all blocks": _replace("default_width", lambda _: 701),
    },
    "flat": {
        "upper halves too few": _replace("upper", lambda blocks: blocks[:-1]),
        "lower halves too short": _replace("lower", lambda rows: rows[:, :-32]),
    },
    "bounds": {"bounds missing": _replace("representatives", lambda each: each[:1])},
}
CASES = [
    *((kind, name) for kind in KINDS for name in EVERYWHERE),
    *((kind, name) for kind, forgeries in OF_KIND.items() for name in forgeries),
]


@cache
def built(kind: str) -> CompiledIndex:
    return KINDS[kind]().build(HEADS.keys, HEADS.queries)


def forged(path: Path, kind: str, name: str) -> None:
    built(kind).save(path)
    with SectionFile.open(path, mmap=False) as file:
        parts = dict(file.header) | {each: file[each].copy() for each in file.names}
    (EVERYWHERE | OF_KIND[kind])[name](parts)
    arrays = {name: each for name, each in parts.items() if isinstance(each, np.ndarray)}
    header = {name: each for name, each in parts.items() if name not in arrays}
    write_sections(path, header, arrays)


@pytest.mark.parametrize("mmap", [True, False], ids=["mapped", "read"])
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_no_search_uses_it(tmp_path: Path, kind: str, name: str, mmap: bool) -> None:
    forged(tmp_path / "index", kind, name)
    kind_of = type(KINDS[kind]())
    for query in QUERIES:
        if kind == "graph" and query.max_dropped_mass is not None:
            continue  # reads keys only
        for prefix_len in (700, 350):
            with pytest.raises(IndexDamagedError):
                index = kind_of.load(tmp_path / "index", mmap=mmap)
                index.search(HEADS.queries[:6], query, prefix_len=prefix_len)


@pytest.mark.parametrize("name", OF_KIND["graph"])
def test_forged_graphs_are_found_by_checks(tmp_path: Path, name: str) -> None:
    forged(tmp_path / "index", "graph", name)
    for check in (GraphIndex.check, GraphIndex.reachable):
        with pytest.raises(IndexDamagedError):
            check(GraphIndex.load(tmp_path / "index"))


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("query", [None, Dipr(1e9)], ids=["all", "range"])
def test_values_that_are_not_finite_are_damage(number: float, query: QueryType | None) -> None:
    values = HEADS.keys.copy()
    values[600, 5] = number
    index = FlatIndex().build(HEADS.keys)
    layer = SparseLayer([index], [Elements(values, "float32")])
    layer.attend(HEADS.queries[None, :3], query, prefix_len=600)
    with pytest.raises(IndexDamagedError, match="row 600: a value that is not finite"):
        layer.attend(HEADS.queries[None, :3], query)


def test_scores_that_are_no_floats_are_the_largest() -> None:
    keys = np.zeros((40, 16), np.float32)
    keys[:, :4] = 1
    keys[7], keys[9] = 1e38, -1e38
    query = np.full((1, 16), 100, np.float32)
    for kind in KINDS.values():
        found = kind().build(keys).search(query, TopK(1))
        assert found.ids[0].tolist() == [7]
        assert found.scores[0][0] == np.finfo(np.float32).max

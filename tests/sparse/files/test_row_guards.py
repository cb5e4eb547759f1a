# SPDX-License-Identifier: Apache-2.0
"""Indexes in files: what a search reads row by row is verified when it is read."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.sparse.answers import assert_same
from tests.sparse.key_sets import key_set
from vllm_relay._C import PageGuard
from vllm_relay.sparse.files.checksum import checksum_pages
from vllm_relay.sparse.files.section_file import SectionFile
from vllm_relay.sparse.index.blocks import BlockIndex
from vllm_relay.sparse.index.coarse import CoarseIndex
from vllm_relay.sparse.index.compiled_index import CompiledIndex
from vllm_relay.sparse.index.elements import Elements, from_float32
from vllm_relay.sparse.index.flat import FlatIndex
from vllm_relay.sparse.index.graph import GraphIndex
from vllm_relay.sparse.index.key_index import IndexDamagedError
from vllm_relay.sparse.index.query_types import Dipr, TopK
from vllm_relay.sparse.index.sparse_layer import SparseLayer

HEADS = key_set("random", 700, 64)
KINDS = {index.kind: index for index in (FlatIndex, CoarseIndex, BlockIndex, GraphIndex)}
QUERIES = HEADS.queries[:4]


@cache
def built(kind: str) -> CompiledIndex:
    return KINDS[kind]().build(HEADS.keys, HEADS.queries)


def flip(path: Path, section: str, offset_bytes: int) -> None:
    content = bytearray(path.read_bytes())
    content[SectionFile.open(path).sections[section].offset_bytes + offset_bytes] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in KINDS for name in sorted(KINDS[kind].read_by_row)]
)
def test_damaged_rows_are_never_read(tmp_path: Path, kind: str, name: str) -> None:
    index, path = built(kind), tmp_path / "index"
    index.save(path)
    whole = path.read_bytes()
    section = SectionFile.open(path).sections[name]
    assert section.has_row_pages
    rng = np.random.default_rng(1)
    noticed, unharmed = 0, 0
    for _ in range(60):
        path.write_bytes(whole)
        flip(path, name, int(rng.integers(section.num_bytes)))
        loaded = type(index).load(path)
        for query in (TopK(5, width=10 if kind == "graph" else 1), Dipr(2.0)):
            for rows in QUERIES[:, None]:
                try:
                    found = loaded.search(rows, query, prefix_len=350)
                except IndexDamagedError as error:
                    assert f"section {name!r}, page" in str(error) and "CRC-32C" in str(error)
                    noticed += 1
                else:
                    assert_same(found, index.search(rows, query, prefix_len=350))
                    unharmed += 1
        with pytest.raises(IndexDamagedError, match=f"section {name!r}"):
            loaded.check()
    assert noticed and unharmed


def uses() -> dict[str, Callable[[CompiledIndex], Any]]:
    return {
        "keys": lambda index: index.keys,
        "certified search": lambda index: index.search(QUERIES, TopK(1, max_dropped_mass=1.0)),
        "check": lambda index: index.check(),
        "to_arrays": lambda index: index.to_arrays(),
    }


@pytest.mark.parametrize("use", uses())
@pytest.mark.parametrize("kind", ["coarse", "graph"])
def test_whole_arrays_are_verified_before_they_are_used(
    tmp_path: Path, kind: str, use: str
) -> None:
    built(kind).save(tmp_path / "index")
    flip(tmp_path / "index", "keys", 699 * 256)
    index = KINDS[kind].load(tmp_path / "index")
    assert index.num_keys == 700 and index.head_size == HEADS.keys.shape[1]
    with pytest.raises(IndexDamagedError, match="section 'keys', page 699 of 700"):
        uses()[use](index)


def test_reachability_reads_whole_edges(tmp_path: Path) -> None:
    built("graph").save(tmp_path / "index")
    flip(tmp_path / "index", "graph", 5)
    with pytest.raises(IndexDamagedError, match="section 'graph', page 0"):
        GraphIndex.load(tmp_path / "index").reachable()


def test_an_index_that_is_built_anew_forgets_its_file(tmp_path: Path) -> None:
    built("graph").save(tmp_path / "index")
    index = GraphIndex.load(tmp_path / "index").build(HEADS.keys[:50], HEADS.queries)
    flip(tmp_path / "index", "keys", 0)
    index.check()


def test_a_build_that_fails_leaves_an_index_that_still_knows_its_file(tmp_path: Path) -> None:
    built("graph").save(tmp_path / "index")
    flip(tmp_path / "index", "codes", 699 * 64)
    index = GraphIndex.load(tmp_path / "index")
    with pytest.raises(ValueError, match="train_queries"):
        index.build(HEADS.keys[:50], np.zeros((3, 2), np.float32))
    assert index.num_keys == 700
    with pytest.raises(IndexDamagedError, match="section 'codes', page 699"):
        index.check()


def test_files_of_others_are_verified_like_own_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = built("graph")
    index.save(tmp_path / "index")
    monkeypatch.setattr(os, "geteuid", lambda: -1)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    loaded = GraphIndex.load(tmp_path / "index")
    assert_same(loaded.search(QUERIES, TopK(9)), index.search(QUERIES, TopK(9)))
    loaded.check()


@pytest.mark.parametrize("threads", [1, 3])
def test_a_layer_reports_damage_of_any_head(tmp_path: Path, threads: int) -> None:
    values = [HEADS.keys] * 3
    indexes = []
    for head in range(3):
        path = tmp_path / str(head)
        built("graph").save(path)
        if head == 1:
            flip(path, "codes", int(built("graph").entries[0]) * 64)
        indexes.append(GraphIndex.load(path))
    queries = np.stack([QUERIES] * 3)
    with pytest.raises(IndexDamagedError, match=r"/1: section 'codes'"):
        SparseLayer(indexes, values).attend(queries, TopK(5), threads=threads)
    indexes[1] = indexes[0]
    expected = SparseLayer([built("graph")] * 3, values).attend(queries, TopK(5))[0]
    found = SparseLayer(indexes, values).attend(queries, TopK(5), threads=threads)[0]
    assert np.array_equal(found.output, expected.output)


def test_threads_that_read_the_same_rows_first_all_get_the_answer(tmp_path: Path) -> None:
    built("graph").save(tmp_path / "index")
    expected = built("graph").search(QUERIES, TopK(9))
    for _ in range(5):
        index = GraphIndex.load(tmp_path / "index")
        with ThreadPoolExecutor(4) as pool:
            for found in pool.map(partial(index.search, QUERIES), [TopK(9)] * 8):
                assert_same(found, expected)


def test_the_guard_of_other_rows_is_refused() -> None:
    keys = from_float32(HEADS.keys, "bfloat16")
    flat = keys.data.reshape(-1).view(np.uint8)
    row_bytes = keys.data[0].nbytes

    def guard(data: np.ndarray, page_bytes: int) -> PageGuard:
        sums = checksum_pages(data, page_bytes)
        return PageGuard(data, page_bytes, sums, lambda page, found: ValueError())

    codes = built("graph")._codes
    rows = built("graph")._arrays["codes"]
    codes.key_set(keys, rows, key_guard=guard(flat, row_bytes))
    other = Elements(keys.data.copy(), keys.dtype)
    for keys_, guard_ in (
        (keys, guard(flat, 2 * row_bytes)),
        (keys, guard(flat[:-row_bytes], row_bytes)),
        (other, guard(flat, row_bytes)),
    ):
        with pytest.raises(ValueError, match="guard: of other rows"):
            codes.key_set(keys_, rows, key_guard=guard_)


def test_a_guard_looks_once(tmp_path: Path) -> None:
    data = np.arange(10_000, dtype=np.uint8)
    sums = checksum_pages(data, 100)
    guard = PageGuard(data, 100, sums, lambda page, found: KeyError((page, found)))
    guard.verify(np.array([3, 7]))
    for page in (3, 50):
        data[100 * page] ^= 1
    guard.verify(np.array([7, 3, 3]))
    found = int(checksum_pages(data, 100)[50])
    with pytest.raises(KeyError) as caught:
        guard.verify_all()
    assert caught.value.args == ((50, found),)
    with pytest.raises(KeyError) as caught:
        guard.verify_anew()
    assert caught.value.args[0][0] == 3
    with pytest.raises(ValueError, match="page 100 of 100"):
        guard.verify(np.array([100]))
    with pytest.raises(ValueError, match="given 99, expected 100"):
        PageGuard(data, 100, sums[1:], lambda page, found: ValueError())

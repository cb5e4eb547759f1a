# SPDX-License-Identifier: Apache-2.0
"""Contexts whose files were changed by someone who knows the format.

`python -m tests.sparse.mutated_contexts FOLDER SEED FIRST END` writes, opens and searches some,
each with right checksums. What it reads must be refused, or give answers that are finite and true
of the keys."""

from __future__ import annotations

import copy
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from tests.sparse.key_sets import key_set
from vllm_relay.long_context.host.host_attention import HostPart, Retrieval, attend_retrieved
from vllm_relay.long_context.host.host_sequence import HostLayer, SequencePlace
from vllm_relay.long_context.window import Residency
from vllm_relay.sparse.contexts.context_fingerprint import ContextFingerprint, ForeignContextError
from vllm_relay.sparse.contexts.context_store import HeadStates, StoredContext
from vllm_relay.sparse.contexts.disk.context_file import ContextFile, write_context
from vllm_relay.sparse.contexts.disk.disk_context_store import DiskContextStore
from vllm_relay.sparse.contexts.retrieval import SessionStats
from vllm_relay.sparse.files.section_file import SectionFile, SectionWriter
from vllm_relay.sparse.index.blocks import BlockIndex
from vllm_relay.sparse.index.coarse import CoarseIndex
from vllm_relay.sparse.index.elements import from_float32
from vllm_relay.sparse.index.flat import FlatIndex
from vllm_relay.sparse.index.graph import GraphIndex
from vllm_relay.sparse.index.key_index import IndexDamagedError
from vllm_relay.sparse.index.query_types import Dipr, QueryType, TopK
from vllm_relay.sparse.plan.head_plan import HeadPlan
from vllm_relay.sparse.plan.options import DBOptions

TOKENS, SIZE, KV_HEADS = 300, 16, 3
FINGERPRINT = ContextFingerprint("tiny", "0", 2, KV_HEADS, SIZE, "float32")
SCALE = SIZE**-0.5
INDEXES = (
    FlatIndex,
    CoarseIndex,
    GraphIndex,
    BlockIndex,
    lambda: BlockIndex(16, "bounds", exact=True),
    GraphIndex,
)
QUERIES: tuple[QueryType | None, ...] = (
    None,
    TopK(5),
    TopK(200, width=30),
    Dipr(alpha=0.01),
    Dipr(alpha=1e-3, estimate=True),
    Dipr(alpha=0.1, max_dropped_mass=0.05),
)
NUMBERS = (0, 1, -1, 15, 16, TOKENS - 1, TOKENS, 2**31 - 1, -(2**31), 1e38, -1e38, 1e-45)
NO_NUMBERS = (np.nan, np.inf, -np.inf)
VALUES: tuple[Any, ...] = (
    None, True, "", "graph", "coarse", [], {}, [[1, None]], {"k": 5}, 0.5, -0.5, 1e308, 10**400,
    *NUMBERS[:9],
)  # fmt: skip

Parts = tuple[dict[str, Any], dict[str, np.ndarray], dict[str, str]]
"""Header, sections, and their page classes."""


def written(folder: Path) -> Parts:
    """A context with an index of every kind."""
    heads = []
    for number, index in enumerate(INDEXES):
        keys = key_set("outliers" if number % 2 else "random", TOKENS, SIZE, number)
        values = np.random.default_rng(number).standard_normal((TOKENS, SIZE)).astype(np.float32)
        plan = HeadPlan(((100, None), (TOKENS, Dipr(alpha=0.01, width=9))), "made up", 0.01)
        heads.append(
            HeadStates(
                from_float32(keys.keys, "float32"),
                from_float32(values, "float32"),
                index().build(keys.keys, keys.train, threads=1),
                plan=plan,
            )
        )
    write_context(folder / "whole", FINGERPRINT, np.arange(TOKENS), heads)
    with SectionFile.open(folder / "whole", mmap=False) as file:
        classes = {name: section.page_class for name, section in file.sections.items()}
        return file.header, {name: file[name] for name in file.names}, classes


def mutated(parts: Parts, rng: np.random.Generator) -> tuple[Parts, list[str]]:
    """A copy with one to three changes, and where they are."""
    header, arrays, classes = copy.deepcopy(parts[0]), dict(parts[1]), parts[2]
    places = []
    for _ in range(int(rng.integers(1, 4))):
        if rng.random() < 0.65:
            names = [each for each in arrays if "/index/" in each or rng.random() < 0.2]
            name = names[rng.integers(len(names))]
            arrays[name] = _changed(arrays[name], rng)
            places.append(name)
        else:
            places.append(_change_header(header, list(arrays), rng))
    return (header, arrays, classes), places


def _changed(array: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    array = array.copy()
    way = rng.integers(10)
    if array.size and way < 6:
        numbers = NUMBERS + NO_NUMBERS if array.dtype.kind == "f" else NUMBERS[:9]
        number = numbers[rng.integers(len(numbers))]
        with np.errstate(all="ignore"):
            value = np.asarray(number).astype(array.dtype)
        if way < 3:
            array.reshape(-1)[rng.integers(0, array.size, rng.integers(1, 5))] = value
        elif way == 3:
            array[rng.integers(len(array)) :] = value
        elif way == 4 and array.ndim > 1:
            array[:, rng.integers(array.shape[1])] = value
        else:
            raw = array.reshape(-1).view(np.uint8)
            raw[rng.integers(0, len(raw), 8)] ^= np.uint8(1 << rng.integers(8))
        return array
    changes = (
        lambda: array[::-1],
        lambda: array[: rng.integers(len(array) + 1)],
        lambda: np.concatenate([array, array[: rng.integers(len(array) + 1)]]),
        lambda: rng.permutation(array),
        lambda: array.T,
        lambda: array.reshape(-1),
        lambda: array[None],
        lambda: array[..., : rng.integers(array.shape[-1] + 1)],
        lambda: array.astype(("float32", "int32", "int64", "uint8", "uint16")[rng.integers(5)]),
        lambda: array[:0],
    )
    with np.errstate(all="ignore"):
        return np.ascontiguousarray(changes[rng.integers(len(changes))]())


def _change_header(header: dict[str, Any], names: list[str], rng: np.random.Generator) -> str:
    """Changes one value, wherever it is."""
    at: Any = header
    place = "header"
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = keys[rng.integers(len(keys))]
        place += f"/{key}"
        if isinstance(at[key], (dict, list)) and at[key] and rng.random() < 0.9:
            at = at[key]
            continue
        if isinstance(at, dict) and rng.random() < 0.1:
            del at[key]
        elif rng.random() < 0.2:
            at[key] = names[rng.integers(len(names))]
        else:
            at[key] = copy.deepcopy(VALUES[rng.integers(len(VALUES))])
        return place


def write(path: Path, parts: Parts) -> None:
    header, arrays, classes = parts
    with SectionWriter(path, header) as writer:
        for name, array in arrays.items():
            writer.add(name, array, page_class=classes[name])


def read(path: Path, whole: Parts, parts: Parts, rng: np.random.Generator) -> str:
    """Whether it was refused, and when. Fails if an answer is not true of the keys."""
    limit = 1 << 20 if rng.random() < 0.2 else None
    store = DiskContextStore(path.parent, FINGERPRINT, limit, value_size=SIZE)
    contexts = store.contexts()
    if not contexts:
        [reason] = store.skipped.values()
        assert str(path) in reason, reason
        return "refused when opened"
    [context] = contexts
    outcome = "accepted"
    for layer in range(FINGERPRINT.num_layers):
        for read_layer in (_search, _attend):
            try:
                read_layer(context, layer, whole, parts, rng)
            except (IndexDamagedError, ForeignContextError):
                outcome = "refused when read"
    try:
        with ContextFile.open(path) as file:
            file.verify()
    except (IndexDamagedError, ForeignContextError):
        pass
    return outcome


def _search(
    context: StoredContext, layer: int, whole: Parts, parts: Parts, rng: np.random.Generator
) -> None:
    for head in range(KV_HEADS):
        name = f"layers/{layer}/kv_heads/{head}/keys"
        query = QUERIES[rng.integers(1, len(QUERIES))]
        assert query is not None
        begin, end = np.sort(rng.integers(0, TOKENS + 1, 2)).tolist()
        queries = (3 * rng.standard_normal((rng.integers(1, 6), SIZE))).astype(np.float32)
        with context.reading():
            index = context.index(layer, head)
            found = index.search(queries, query, begin=begin, prefix_len=end)
        for row, ids, scores in zip(queries, found.ids, found.scores, strict=True):
            assert len(np.unique(ids)) == len(ids), (name, ids)
            assert np.all((ids >= begin) & (ids < end)), (name, ids)
            assert np.isfinite(scores).all()
            if parts[1][name] is whole[1][name]:
                products = whole[1][name][ids].astype(np.float64) * row
                rounding = 1e-5 * np.abs(products).sum(axis=1)
                assert np.all(np.abs(scores - products.sum(axis=1)) <= rounding), name


def _attend(
    context: StoredContext, layer: int, whole: Parts, parts: Parts, rng: np.random.Generator
) -> None:
    """As an engine does."""
    query = QUERIES[rng.integers(len(QUERIES))]
    own = HostLayer(SequencePlace(200, 150, 16, 32, 0), KV_HEADS, SIZE, torch.float32)
    generator = torch.Generator().manual_seed(int(rng.integers(1000)))
    own.write(200, *torch.randn(2, 120, KV_HEADS, SIZE, generator=generator))
    part = HostPart(own, context, layer, Residency(16, 288), 320)
    asked = 3 * torch.randn(1, 2 * KV_HEADS, SIZE, generator=generator)
    output, lse = torch.zeros_like(asked), torch.full(asked.shape[:2], -torch.inf)
    given: dict[str, Any] = {} if query is None else {"query": query}
    if rng.integers(2):
        given["index"] = "flat"  # plans do not count
    options = DBOptions(**given)
    retrieval = Retrieval(Dipr(alpha=0.01, scale=SCALE), options, SCALE)
    if context.layer(layer) is None:
        return  # read through a pool, which engines do not
    attend_retrieved([part], [0], asked, output, lse, retrieval, SessionStats())
    heads = range(KV_HEADS)
    values = [parts[1][f"layers/{layer}/kv_heads/{head}/values"] for head in heads]
    means = [parts[1][f"layers/{layer}/kv_heads/{head}/value_means"] for head in heads]
    if max(float(np.abs(each).max()) for each in values + means) < 1e36:
        assert output.isfinite().all() and lse.isfinite().all()


@mock.patch("os.fsync", new=lambda descriptor: None)  # nobody pulls a plug here
def run(folder: Path, seed: int, first: int, end: int) -> Counter[str]:
    """How many cases ended how; writes the number of each before it is tried."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    whole = written(folder)
    tried = folder / "case"
    place = folder / "contexts"
    place.mkdir(exist_ok=True)
    outcomes: Counter[str] = Counter()
    for number in range(first, end):
        tried.write_text(str(number))
        rng = np.random.default_rng([seed, number])
        parts, places = mutated(whole, rng)
        path = place / "mutated.relayctx"
        try:
            write(path, parts)
        except ValueError:
            outcomes["cannot be written"] += 1
            continue
        try:
            outcomes[read(path, whole, parts, rng)] += 1
        except Exception as error:
            raise AssertionError(f"case {number} of seed {seed}, {places}") from error
    return outcomes


if __name__ == "__main__":
    import logging

    logging.disable(logging.WARNING)
    folder, *numbers = sys.argv[1:]
    print(json.dumps(run(Path(folder), *map(int, numbers))))

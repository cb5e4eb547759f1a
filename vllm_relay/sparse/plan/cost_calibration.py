# SPDX-License-Identifier: Apache-2.0
"""Measures what searches cost on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from vllm_relay.processor import cpu_name
from vllm_relay.sparse.index.coarse import CoarseIndex
from vllm_relay.sparse.index.compiled_index import CompiledIndex
from vllm_relay.sparse.index.elements import Elements, from_float32
from vllm_relay.sparse.index.flat import FlatIndex
from vllm_relay.sparse.index.graph import GraphIndex
from vllm_relay.sparse.index.query_types import Dipr, QueryType, TopK
from vllm_relay.sparse.index.sparse_layer import SparseLayer, attend
from vllm_relay.sparse.plan.head_sample import mean_work
from vllm_relay.sparse.plan.search_cost import (
    KindCost,
    SearchCost,
    SearchWork,
    costs_path,
    write_costs,
)

SIZES = (4096, 32768, 131072)
HEAD_SIZE = 128
GROUP = 4
_SHORT = 256
_QUERIES = 12
_ROUNDS = 5
_SCANNED = ("call_us", "query_us", "distance_ns", "distance_query_ns")
_FITTED = {
    "full": ("found_ns",),
    "flat": (*_SCANNED, "rescored_ns", "found_ns"),
    "coarse": (*_SCANNED, "hop_ns", "centre_query_ns"),
    "graph": (*_SCANNED, "hop_ns", "hop_query_ns", "filtered_hop_ns"),
}


@dataclass
class Sample:
    """Some searches of one kind: the mean work of one, and its microseconds in every round."""

    work: SearchWork
    run: Callable[[np.ndarray], object]
    groups: Sequence[np.ndarray]
    times_us: list[float] = field(default_factory=list)


def calibrate_costs(
    *,
    sizes: Sequence[int] = SIZES,
    folder: Path | None = None,
    store: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> SearchCost:
    """Builds an index of every kind at every size, searches it with narrow and wide searches of one
    and of four queries, and fits `SearchCost`. Takes about a minute of one core.

    Args:
        sizes: numbers of keys, rising.
        folder: of measured costs; $VLLM_RELAY_CACHE or the user's cache unless given.
        store: write them there, for `load_costs` of the next process.
        progress: is told what is being measured.

    Raises:
        OSError: the folder cannot be written.
    """
    kinds: dict[str, list[KindCost]] = {"full": [], "flat": [], "coarse": [], "graph": []}
    for size in sizes:
        progress(f"{size} keys")
        for kind, cost in _costs_at(size).items():
            for other in kinds[kind][-1:]:
                # no part costs less in a larger index; where it seems so, that is noise
                largest = {name: max(x, getattr(other, name)) for name, x in asdict(cost).items()}
                cost = KindCost(**largest)
            kinds[kind].append(cost)
    costs = SearchCost(tuple(sizes), {kind: tuple(each) for kind, each in kinds.items()})
    if store:
        write_costs(costs_path(folder), costs, {"cpu": cpu_name(), "head_size": HEAD_SIZE})
    return costs


def _costs_at(num_keys: int) -> dict[str, KindCost]:
    keys, values, train, queries = _states(num_keys)
    indexes = [
        kind().build(keys, train, threads=1) for kind in (FlatIndex, CoarseIndex, GraphIndex)
    ]
    samples = [_full_sample(keys, values, rows) for rows in (queries[:3], queries[:3, :1])]
    # all scans of one index are as long: what a call costs besides shows in a short one
    short = FlatIndex().build(keys.rows(0, _SHORT), threads=1)
    for index in (short, *indexes):
        for group in (1, GROUP):
            for query in _query_types(index):
                samples.append(_sample(index, values, queries[:, :group], query))
                if index.kind == "graph":
                    rows, prefix_len = queries[:, :group], num_keys // 3
                    samples.append(_sample(index, values, rows, query, prefix_len))
    _time_in_turn(samples)
    costs = {}
    found: dict[str, float] = {}
    for kind, names in _FITTED.items():
        fitted = fit([each for each in samples if each.work.kind == kind], names, found)
        if kind == "flat":
            # found keys cost the same whoever found them; a flat index finds as many as one likes
            found = {name: fitted[name] for name in ("rescored_ns", "found_ns")}
        costs[kind] = KindCost(**{**found, **fitted})
    return costs


def _states(num_keys: int) -> tuple[Elements, Elements, np.ndarray, np.ndarray]:
    """Keys and values in bfloat16, training queries [m, d] and queries [tokens, GROUP, d], whose
    scores have a deviation of three nats."""
    rng = np.random.default_rng(0)
    d = HEAD_SIZE
    spread = np.arange(1, d + 1, dtype=np.float32) ** np.float32(-0.3)
    spread *= np.sqrt(3.0 / np.sqrt(float((spread**4).sum()) / d)).astype(np.float32)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    keys, values = normal(num_keys, d) * spread, normal(num_keys, d)
    train = normal(round(0.4 * num_keys), d) * spread
    tokens = normal(_QUERIES, 1, d) + np.float32(0.3) * normal(_QUERIES, GROUP, d)
    return (
        from_float32(keys, "bfloat16"),
        from_float32(values, "bfloat16"),
        train,
        np.ascontiguousarray(tokens * spread, np.float32),
    )


def _query_types(index: CompiledIndex) -> Iterator[QueryType]:
    if index.kind == "flat":
        for alpha in (0.3, 0.1, 0.03, 0.01, 0.003, 1e-3, 1e-4, 1e-6):
            yield Dipr(alpha=alpha)
        return
    most = index.num_lists if isinstance(index, CoarseIndex) else min(2000, index.num_keys // 4)
    least = max(1, most // 60)
    for width in np.unique(np.geomspace(least, most, 6).astype(int)).tolist():
        yield Dipr(alpha=0.1, width=width)
        yield TopK(max(1, min(100, index.num_keys // 10)), width=width)


def _sample(
    index: CompiledIndex,
    values: Elements,
    queries: np.ndarray,
    query: QueryType,
    prefix_len: int | None = None,
) -> Sample:
    groups = [np.ascontiguousarray(rows) for rows in queries]
    results = [index.search(rows, query, prefix_len=prefix_len) for rows in groups]
    work = mean_work(index, results, queries.shape[1])
    if prefix_len is not None:
        work = replace(work, filtered_hops=work.hops * (1 - prefix_len / index.num_keys))
    layer = SparseLayer([index], [values.rows(0, index.num_keys)])

    def run(rows: np.ndarray) -> object:
        return layer.attend(rows[None], query, prefix_len=prefix_len, threads=1)

    return Sample(work, run, groups)


def _full_sample(keys: Elements, values: Elements, queries: np.ndarray) -> Sample:
    num_keys, group = keys.shape[0], queries.shape[1]
    everything = [np.arange(num_keys, dtype=np.int32)] * group
    groups = [np.ascontiguousarray(rows) for rows in queries]
    work = SearchWork("full", num_keys, group, found=num_keys * group)
    return Sample(work, lambda rows: attend(rows, keys, values, everything), groups)


def _time_in_turn(samples: Sequence[Sample]) -> None:
    """CPU time of the calling thread; all samples meet the same disturbances."""
    for number in range(_ROUNDS + 1):
        for sample in samples[:: -1 if number % 2 else 1]:
            began_ns = time.thread_time_ns()
            for rows in sample.groups:
                sample.run(rows)
            if number:  # the first one warms up
                spent_us = (time.thread_time_ns() - began_ns) / 1e3
                sample.times_us.append(spent_us / len(sample.groups))


def fit(
    samples: Sequence[Sample], names: Sequence[str], known: Mapping[str, float]
) -> dict[str, float]:
    """The costs `names`, none below 0, that explain the times best, each by its relative error,
    beside those that are known."""
    works = [sample.work for sample in samples]
    times = np.array([np.median(sample.times_us) for sample in samples])
    columns = np.array(
        [[KindCost(**{name: 1.0}).time_us(work, 1, 1) for name in names] for work in works]
    )
    columns /= times[:, None]
    target = 1 - np.array([KindCost(**known).time_us(work, 1, 1) for work in works]) / times
    scale = np.maximum(columns.max(axis=0), 1e-30)
    fitted = dict.fromkeys(names, 0.0)
    used = np.arange(len(names))
    while len(used):
        solution = np.linalg.lstsq((columns / scale)[:, used], target, rcond=1e-8)[0]
        if (solution >= 0).all():
            for place, value in zip(used, solution, strict=True):
                fitted[names[int(place)]] = float(value / scale[place])
            break
        used = np.delete(used, solution.argmin())
    return fitted

# SPDX-License-Identifier: Apache-2.0
"""What only attention asks of an index: groups of query heads, ranges, prefixes, and the error of
the attention that follows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.sparse.heads.corpus import Head
from benchmarks.sparse.searches import exact
from benchmarks.sparse.searches.built import Built
from benchmarks.sparse.searches.contenders import OwnIndex
from benchmarks.sparse.searches.curves import at_recall
from benchmarks.support.formatting import Row
from tests.support.reference import attend
from vllm_relay.sparse import Dipr, KeyIndex, QueryType, TopK

SHARING_RECALL = 0.95
WINDOW_FIRST, WINDOW_LAST = 32, 64
"""Tokens whose keys are always scored."""


class Searched(NamedTuple):
    """What a pass over queries [tests, heads, d] found, and its cost per search of a group."""

    ids: list[np.ndarray]
    distances: float
    bytes: float
    cpu_s: float


def search_all(
    contender: OwnIndex,
    groups: np.ndarray,
    query: QueryType,
    prefix_len: int | None = None,
    window_max: np.ndarray | None = None,
) -> Searched:
    """One search per group, one after the other; `ids` go through the heads of a group first."""
    index, results = contender.index, []
    began_s = time.thread_time()
    for i, group in enumerate(groups):
        best = None if window_max is None else window_max[i]
        results.append(index.search(group, query, prefix_len=prefix_len, window_max=best))
    cpu_s = (time.thread_time() - began_s) / len(groups)
    return Searched(
        [ids for result in results for ids in result.ids],
        statistics.fmean(result.stats.distances for result in results),
        statistics.fmean(result.stats.bytes for result in results),
        cpu_s,
    )


def group_rows(
    contender: OwnIndex, head: Head, k: int, efforts: Sequence[int], rounds: int
) -> list[Row]:
    """All heads of a group in one search against one search for each head, by effort."""
    tests, heads, d = head.queries.shape
    flat = head.queries.reshape(-1, d)
    truth = exact.top_k(flat, head.keys, k)
    samples: dict[int, list[tuple[Searched, Searched]]] = {effort: [] for effort in efforts}
    for number in range(rounds):
        for effort in list(efforts)[:: -1 if number % 2 else 1]:
            query = TopK(k, width=effort)
            alone = search_all(contender, flat[:, None], query)
            together = search_all(contender, head.queries, query)
            samples[effort].append((alone, together))
    rows = []
    for effort, pairs in samples.items():
        alone, together = pairs[0]
        alone_recall, group_recall = (
            exact.recall(found.ids, flat, head.keys, truth).reshape(tests, heads).mean(axis=0)
            for found in (alone, together)
        )
        rows.append(
            {
                "contender": contender.name,
                "effort": effort,
                "recall alone": float(alone_recall.mean()),
                "least recall in group": float(group_recall.min()),
                "distances alone": alone.distances,
                "distances of group": together.distances,
                "cpu us alone": statistics.median(pair[0].cpu_s for pair in pairs) * 1e6,
                "cpu us of group": statistics.median(pair[1].cpu_s for pair in pairs) * 1e6,
            }
        )
    return rows


def group_cost(rows: Sequence[Row], recall: float) -> float | None:
    """The time of a group's search over that of one head's, each where it has the recall.

    Where one head has more at the lowest effort already, that is the recall wanted of the group.
    """
    recall = max(recall, rows[0]["recall alone"])
    alone = at_recall(
        [row["recall alone"] for row in rows], [row["cpu us alone"] for row in rows], recall
    )
    together = at_recall(
        [row["least recall in group"] for row in rows],
        [row["cpu us of group"] for row in rows],
        recall,
        or_bound=True,
    )
    return together / alone if alone and together else None


def sharing_row(own: Built, shared: Built, head: Head, k: int, efforts: Sequence[int]) -> Row:
    """An index for all heads of a group against one each, by the group's first head.

    Args:
        own: the same keys, trained with as many queries of the first head alone.
        efforts: the first at which `own` has nearly all recall is looked at.
    """
    queries = head.queries[:, 0]
    truth = exact.top_k(queries, head.keys, k)
    recalls = {}
    for effort in efforts:
        recalls = {
            name: float(exact.recall(
                search_all(built.contender, queries[:, None], TopK(k, width=effort)).ids,
                queries, head.keys, truth,
            ).mean())
            for name, built in (("one each", own), ("shared", shared))
        }  # fmt: skip
        if recalls["one each"] >= SHARING_RECALL:
            break
    heads = head.group_size
    row: Row = {"contender": shared.contender.name, "effort": effort}
    for name, count, built in (("one each", heads, own), ("shared", 1, shared)):
        row[f"build CPU s, {name}"] = count * built.build_cpu_s
        row[f"bytes, {name}"] = count * _index_bytes(built.contender.index)
        row[f"recall, {name}"] = recalls[name]
    return row


def _index_bytes(index: KeyIndex) -> int:
    """Of what the index adds to the keys."""
    return sum(array.nbytes for name, array in index.to_arrays()[1].items() if name != "keys")


def window_maximum(head: Head) -> np.ndarray:
    """[tests, heads]; the best score among the first and last keys."""
    keys = head.keys[: head.prefix_len]
    window = np.concatenate([keys[:WINDOW_FIRST], keys[-WINDOW_LAST:]])
    return (head.queries @ window.T).max(axis=2)


def range_rows(
    contender: OwnIndex, head: Head, beta: float, efforts: Sequence[int | None], rounds: int
) -> list[Row]:
    """What `Dipr(beta)` finds of the true range sets, with the window's best score known."""
    queries = head.queries[:, 0]
    truth = exact.ranges(queries, head.keys, beta)
    best = window_maximum(head)[:, :1]
    rows = []
    for effort in efforts:
        query = Dipr(beta=beta, width=effort)
        passes = [
            search_all(contender, queries[:, None], query, window_max=best) for _ in range(rounds)
        ]
        found = passes[0]
        mass = exact.range_mass(found.ids, truth, queries, head.keys, head.scale)
        shared = [
            len(np.intersect1d(ids, true_ids)) / len(true_ids)
            for ids, true_ids in zip(found.ids, truth, strict=True)
        ]
        rows.append(
            {
                "contender": contender.name,
                "width": "default" if effort is None else effort,
                "true set, median": float(np.median([len(ids) for ids in truth])),
                "recall of the set": float(np.mean(shared)),
                "mass": float(mass.mean()),
                "mass, worst 5%": float(np.quantile(mass, 0.05)),
                "keys scored": found.distances,
                "cpu us": statistics.median(one.cpu_s for one in passes) * 1e6,
            }
        )
    return rows


def prefix_row(
    contender: OwnIndex, whole: Head, part: Head, k: int, effort: int, rounds: int
) -> Row:
    """A search for tokens that reuse a part of the keys against one for those that reuse all."""
    row: Row = {"contender": contender.name, "effort": effort, "reuse": part.prefix_len}
    for name, head in (("whole", whole), ("prefix", part)):
        queries, keys = head.queries[:, 0], head.keys[: head.prefix_len]
        truth = exact.top_k(queries, keys, k)
        limit = None if head.prefix_len == head.num_keys else head.prefix_len
        query = TopK(k, width=effort)
        passes = [
            search_all(contender, queries[:, None], query, prefix_len=limit) for _ in range(rounds)
        ]
        found = passes[0]
        beyond = sum(int((ids >= head.prefix_len).sum()) for ids in found.ids)
        if beyond:
            raise RuntimeError(f"{contender.name}: {beyond} keys found behind the prefix")
        row[f"recall, {name}"] = float(exact.recall(found.ids, queries, keys, truth).mean())
        row[f"distances, {name}"] = found.distances
        row[f"cpu us, {name}"] = statistics.median(one.cpu_s for one in passes) * 1e6
    row["distances ratio"] = row["distances, prefix"] / row["distances, whole"]
    return row


def error_rows(
    contender: OwnIndex, head: Head, queries: Sequence[QueryType], tests: int
) -> list[Row]:
    """The relative L2 error of attention over the keys found, and the bytes it took.

    Values count as two bytes per channel, as they are kept in bfloat16.
    """
    groups = head.queries[:tests, :1]
    flat = groups[:, 0]
    right = exact.attention(flat, head.keys, head.values, head.scale)
    rows = []
    for query in queries:
        found = search_all(contender, groups, query)
        output, _ = attend(flat, head.keys, head.values, found.ids, scale=head.scale)
        error = np.linalg.norm(output - right, axis=1) / np.linalg.norm(right, axis=1)
        tokens = statistics.fmean(len(ids) for ids in found.ids)
        rows.append(
            {
                "contender": f"{contender.name}, {type(query).__name__}",
                "query": f"{query.k} keys" if isinstance(query, TopK) else f"beta {query.beta:g}",
                "tokens": tokens,
                "KiB read": (found.bytes + tokens * 2 * head.values.shape[1]) / 1024,
                "error, median": float(np.median(error)),
                "error, p99": float(np.quantile(error, 0.99)),
            }
        )
    return rows

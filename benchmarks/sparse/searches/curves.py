# SPDX-License-Identifier: Apache-2.0
"""Recall against time: sweeps of contenders, measured in turn, and the time at a wanted recall."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.sparse.searches import exact
from benchmarks.sparse.searches.contenders import Contender, Search
from benchmarks.support.formatting import Row
from benchmarks.support.timing import Timing

ENOUGH_RECALL = 0.995
"""Nobody is asked for more; sweeps end at the first effort that gets there."""
SAMPLE_S = 2.5
"""Slower passes take only the first queries of the set."""
MIN_SAMPLE_QUERIES = 20


@dataclass
class Point:
    """One contender at one effort.

    Attributes:
        recall: mean over the queries.
        distances: keys scored per query; None if not known.
        sample_queries: how many queries a pass takes.
        cpu_s, wall_s: per query, in every round; CPU time is the thread's.
    """

    contender: Contender
    effort: int
    recall: float
    distances: float | None
    sample_queries: int
    cpu_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)

    def row(self) -> Row:
        return {
            "contender": self.contender.name,
            "effort": self.effort,
            "recall": f"{self.recall:.4f}",
            "distances": self.distances,
            "cpu us": Timing(self.cpu_s).median_s * 1e6,
            "wall us": Timing(self.wall_s).median_s * 1e6,
            "spread": Timing(self.cpu_s).spread,
        }


def sweep(
    contender: Contender, queries: np.ndarray, keys: np.ndarray, truth: np.ndarray
) -> list[Point]:
    """The recall at each effort until it is enough.

    Args:
        queries: [q, d]
        truth: [q, k], the best keys.
    """
    points = []
    k = truth.shape[1]
    for effort in contender.efforts_for(k):
        search = contender.search(k, effort)
        contender.take_distances()
        began_s = time.thread_time()
        found = _pass(contender, search, queries)
        per_query_s = (time.thread_time() - began_s) / len(queries)
        distances = contender.take_distances()
        recall = float(exact.recall(found, queries, keys, truth).mean())
        sample = int(SAMPLE_S / max(per_query_s, 1e-9))
        points.append(
            Point(
                contender,
                effort,
                recall,
                None if distances is None else distances / len(queries),
                min(len(queries), max(MIN_SAMPLE_QUERIES, sample)),
            )
        )
        if recall >= ENOUGH_RECALL:
            break
    return points


def time_curves(
    curves: Sequence[Sequence[Point]], queries: np.ndarray, k: int, rounds: int
) -> None:
    """Fills in the times of all points: in every round all contenders at their first effort, then
    all at their second; every other round backwards.
    """
    longest = max(map(len, curves))
    points = [curve[i] for i in range(longest) for curve in curves if i < len(curve)]
    for number in range(rounds):
        for point in points[:: -1 if number % 2 else 1]:
            search = point.contender.search(k, point.effort)
            sample = queries[: point.sample_queries]
            _pass(point.contender, search, sample[: MIN_SAMPLE_QUERIES // 2])
            wall_s, cpu_s = time.perf_counter(), time.thread_time()
            _pass(point.contender, search, sample)
            point.cpu_s.append((time.thread_time() - cpu_s) / len(sample))
            point.wall_s.append((time.perf_counter() - wall_s) / len(sample))


def at_recall(
    recalls: Sequence[float], values: Sequence[float], wanted: float, *, or_bound: bool = False
) -> float | None:
    """The value at a recall, on the line between the two efforts around it.

    Args:
        recalls, values: by rising effort. Efforts that gain nothing over a lower one are left out.
        or_bound: where the lowest effort already has more recall, take its value, which is more
            than needed.

    Returns:
        None if the recall is never reached, or if the value is unknown: below the lowest effort.
    """
    rising: list[tuple[float, float]] = []
    for recall, value in zip(recalls, values, strict=True):
        if not rising or recall > rising[-1][0]:
            rising.append((recall, value))
    above = bisect_left(rising, wanted, key=lambda point: point[0])
    if above == len(rising):
        return None
    if above == 0:
        return rising[0][1] if or_bound or rising[0][0] == wanted else None
    (low, low_value), (high, high_value) = rising[above - 1], rising[above]
    return low_value + (high_value - low_value) * (wanted - low) / (high - low)


def times_at_recall(
    curve: Sequence[Point], wanted: float, *, or_bound: bool = False
) -> list[float] | None:
    """CPU seconds per query at a recall, in every round; exact contenders have but one time."""
    recalls = [point.recall for point in curve]
    if _is_exact(curve):
        return curve[0].cpu_s
    times = [
        at_recall(recalls, times, wanted, or_bound=or_bound)
        for times in zip(*(point.cpu_s for point in curve), strict=True)
    ]
    known = [value for value in times if value is not None]
    return known if len(known) == len(times) else None


def distances_at_recall(
    curve: Sequence[Point], wanted: float, *, or_bound: bool = False
) -> float | None:
    """Keys scored per query at a recall; None if the contender does not tell."""
    if _is_exact(curve):
        return curve[0].distances
    known = [(p.recall, p.distances) for p in curve if p.distances is not None]
    if len(known) < len(curve):
        return None
    recalls, counts = [recall for recall, _ in known], [count for _, count in known]
    return at_recall(recalls, counts, wanted, or_bound=or_bound)


def _is_exact(curve: Sequence[Point]) -> bool:
    return len(curve[0].contender.efforts) == 1 and curve[0].recall >= ENOUGH_RECALL


def _pass(
    contender: Contender, search: Search, queries: np.ndarray
) -> Sequence[np.ndarray] | np.ndarray:
    if contender.whole_batch:
        return search(queries)
    return [search(queries[i : i + 1])[0] for i in range(len(queries))]

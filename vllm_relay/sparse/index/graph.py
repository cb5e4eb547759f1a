# SPDX-License-Identifier: Apache-2.0
"""RoarGraph: a graph of keys built from what queries find, searched best first."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_relay import _C
from vllm_relay.sparse.files.aligned import aligned_empty
from vllm_relay.sparse.index import compiled_index
from vllm_relay.sparse.index.compiled_index import CodedKeys, CompiledIndex
from vllm_relay.sparse.index.default_width import TARGET_K, split_queries, width_to_find
from vllm_relay.sparse.index.elements import Elements
from vllm_relay.sparse.index.key_codes import row_bytes
from vllm_relay.sparse.index.key_index import IndexDamagedError
from vllm_relay.sparse.index.nearest import nearest_keys
from vllm_relay.sparse.index.query_types import MAX_COUNT, QueryType, TopK

HUB_HEAVY = 0.3
"""Below this many different best keys per training query, a few keys are everybody's best."""


@dataclass(frozen=True)
class GraphOptions:
    """How a graph is built.

    Attributes:
        nearest: keys that each training query contributes (the paper's M_sq, N_q).
        projection_degree: edges from neighbourhood-aware projection (M).
        supply_degree: edges from connectivity enhancement, as many again for the way back.
        build_width: beam of the searches during connectivity enhancement (L_pq).
        pivot_rank: a key is a pivot of the queries that rank it this high; the paper takes the
            best key only, which leaves most keys without edges where a few are everybody's best.
        queries_per_pivot: how many queries a pivot takes candidates from.
        norm_weight: closeness of keys is k.p - norm_weight |p|^2 / 2: inner product at 0,
            Euclidean distance at 1.
    """

    nearest: int = 100
    projection_degree: int = 24
    supply_degree: int = 3
    build_width: int = 60
    pivot_rank: int = 30
    queries_per_pivot: int = 16
    norm_weight: float = 0.1

    @property
    def row_slots(self) -> int:
        """int32 slots of a node: the number of its edges and these, in whole cache lines."""
        slots = 1 + self.projection_degree + 2 * self.supply_degree + _SPARE_EDGES
        return -(-slots // 16) * 16


SPREAD = GraphOptions()
HUBS = GraphOptions(projection_degree=28, supply_degree=8, build_width=80, norm_weight=0.7)
_SPARE_EDGES = 1


class GraphIndex(CompiledIndex):
    """Eight-bit codes for the way, keys for the answer; `width` of a query is the beam.

    Args:
        options: None: `SPREAD` or `HUBS`, by how many different keys are the best of a training
            query.
        device: where the nearest keys of training queries are found; see `nearest_keys`.
    """

    kind = "graph"
    own_settings = ("default_width", "hub_statistic")
    own_arrays = ("codes", "graph", "entries")
    read_by_row = frozenset({"keys", "codes", "graph"})

    def __init__(self, options: GraphOptions | None = None, device: str | None = None) -> None:
        self._options = options
        self._device = device
        self.default_width = TARGET_K
        self.hub_statistic = 1.0

    def _build(self, coded: CodedKeys, train_queries: Any, seed: int, threads: int) -> None:
        """Without training queries, the keys themselves stand in for them."""
        elements, codes, rows = coded
        n, d = elements.shape
        if train_queries is None:
            step = max(1, n // max(1, int(0.4 * n)))
            queries = Elements(elements.data[::step], elements.dtype).to_float32()
        else:
            queries = compiled_index.check_train_queries(train_queries, d)
        key_set = codes.key_set(elements, rows)
        options = self._options
        k = min((options or SPREAD).nearest, n)
        nearest = nearest_keys(
            elements, codes, rows, queries, k, threads=threads, device=self._device
        )
        held, taught = split_queries(len(queries), seed)
        if len(queries):
            self.hub_statistic = len(np.unique(nearest[:, 0])) / len(queries)
        if options is None:
            options = HUBS if self.hub_statistic < HUB_HEAVY else SPREAD
        entries = np.array([_most_central(elements, codes.mean)], np.int32)
        graph = aligned_empty((n, options.row_slots), np.int32)
        graph[:] = 0
        _C.index.build_graph(
            "auto", key_set, graph, np.ascontiguousarray(nearest[taught]), entries,
            options.projection_degree, options.supply_degree, options.build_width,
            options.pivot_rank, options.queries_per_pivot, options.norm_weight, threads,
        )  # fmt: skip
        self._set(elements, codes, {"codes": rows, "graph": graph, "entries": entries})
        self.default_width = k = min(TARGET_K, k)
        if len(held):
            most = max(k, min(self.num_keys, 20 * k))
            truth = list(nearest[held][:, :k])
            self.default_width = width_to_find(self, queries[held], truth, low=k, high=most)

    def _new_searcher(self) -> Any:
        graph, self.entries = self._arrays["graph"], self._arrays["entries"]
        self.hop_bytes = 4 * graph.shape[1]
        return _C.index.GraphSearcher(
            "auto", self._key_set("codes"), self._codes.outside, graph,
            self._guards.get("graph"),
        )  # fmt: skip

    def width_of(self, query: QueryType) -> int:
        if query.width is None and isinstance(query, TopK):
            return max(self.default_width, query.k)
        return super().width_of(query)

    def reachable(self) -> np.ndarray:
        """bool [n]; which keys a search can get to from the entries."""
        self._verify("graph")
        graph = self._arrays["graph"]
        _check_graph(graph, self.num_keys)
        reached = np.zeros(self.num_keys, bool)
        frontier = self.entries
        reached[frontier] = True
        columns = np.arange(graph.shape[1] - 1)
        while len(frontier):
            rows = graph[frontier]
            neighbours = rows[:, 1:][columns < rows[:, :1]]
            frontier = np.unique(neighbours[~reached[neighbours]])
            reached[frontier] = True
        return reached

    def _has_codes(self, rows: np.ndarray) -> bool:
        num_unreachable = int((~self.reachable()).sum())
        if num_unreachable:
            raise IndexDamagedError(
                f"graph index: {num_unreachable} of {self.num_keys} keys cannot be reached"
            )
        return np.array_equal(rows, self._arrays["codes"])

    def _fits(self, settings: dict[str, Any], arrays: dict[str, np.ndarray]) -> bool:
        rows, graph, entries = arrays.values()
        n, d = self._keys.shape
        return (
            rows.shape == (n, row_bytes(d))
            and rows.dtype == np.uint8
            and graph.dtype == entries.dtype == np.int32
            and graph.ndim == 2
            and len(graph) == n
            and graph.shape[1] >= 16
            and graph.shape[1] % 16 == 0
            and entries.ndim == 1
            and len(entries) >= 1
            and int(entries.min()) >= 0
            and int(entries.max()) < n
            and type(settings["default_width"]) is int
            and 1 <= settings["default_width"] <= MAX_COUNT
            and math.isfinite(settings["hub_statistic"])
        )


def _check_graph(graph: np.ndarray, num_keys: int) -> None:
    counts = graph[:, 0]
    if counts.min() < 0 or counts.max() > graph.shape[1] - 1:
        raise IndexDamagedError("graph index: a number of neighbours is out of range")
    neighbours = graph[:, 1:]  # a search looks at all of them: slots not used hold old ones
    if not (neighbours.min() >= 0 and neighbours.max() < num_keys):
        raise IndexDamagedError("graph index: a neighbour is none of its keys")


def _most_central(keys: Elements, mean: np.ndarray) -> int:
    """The key nearest to the mean."""
    best, best_distance = 0, np.inf
    for begin in range(0, keys.shape[0], 1 << 16):
        values = keys.rows(begin, begin + (1 << 16)).to_float32() - mean
        distances = np.einsum("nd,nd->n", values, values)
        at = int(distances.argmin())
        if distances[at] < best_distance:
            best, best_distance = begin + at, distances[at]
    return best

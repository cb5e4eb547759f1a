# SPDX-License-Identifier: Apache-2.0
"""Which index a kv head gets, and what its queries ask of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from vllm_relay.sparse.coarse import CoarseIndex
from vllm_relay.sparse.elements import Elements
from vllm_relay.sparse.face import CompiledIndex
from vllm_relay.sparse.flat import FlatIndex
from vllm_relay.sparse.graph import GraphIndex
from vllm_relay.sparse.head_plan import HeadPlan
from vllm_relay.sparse.head_profile import DEFAULT_QUERIES, MeasuredSearch, profile_head
from vllm_relay.sparse.index import KeyIndex
from vllm_relay.sparse.index_measure import exact_attention, measure_index
from vllm_relay.sparse.options import DBOptions
from vllm_relay.sparse.planner import Plan, plan
from vllm_relay.sparse.search_cost import KINDS, SearchCost

_CLASSES: dict[str, type[CompiledIndex]] = {
    "flat": FlatIndex,
    "coarse": CoarseIndex,
    "graph": GraphIndex,
}
PROFILE_TOKENS = 32
"""Of which the queries of all heads of the group are looked at."""
_PROFILE_SHARE = 8
"""One of so many training queries, at most, is kept back for the profile."""
_LOST_MASS = 0.01
"""Attention weight that an index may lose of the answer to a query that was asked for."""
PLANNED_SHARES = (0.5, 0.25)
"""Of the context that may be reused, besides all of it."""


def index_for_layer(layer_idx: int, options: DBOptions) -> KeyIndex:
    """An unbuilt index, by the rules of the paper where there is nothing to plan by: a flat one
    for the first layer, which reads many keys, and a graph for the others.

    Source: AlayaDB (2504.10326), section 6.2, the rules of figure 8.
    """
    if options.index_factory is not None:
        return options.index_factory(layer_idx)
    kind = options.index
    if kind in ("auto", "rules"):
        kind = "flat" if layer_idx == 0 else "graph"
    return _CLASSES[kind]()


def build_index(
    layer_idx: int,
    keys: Elements,
    values: Elements,
    train_queries: Elements | None,
    group: int,
    options: DBOptions,
    costs: SearchCost | None = None,
) -> tuple[KeyIndex, HeadPlan | None]:
    """Builds the index of a kv head and, with `index="auto"`, plans what is asked of it.

    Args:
        keys, values: [n, d] and [n, value_size].
        train_queries: [m, d], in token order, the query heads of the group in turn. Without
            enough of them there is no plan.
        group: query heads that share the keys.
        costs: None for what was measured on this machine, or ships.
    """
    seed, threads = options.seed, options.threads
    sample, taught = None, train_queries
    if options.index == "auto" and options.index_factory is None:
        sample, taught = hold_out(train_queries, group)
    if sample is None or train_queries is None:
        unbuilt = index_for_layer(layer_idx, options)
        return unbuilt.build(keys, train_queries, seed=seed, threads=threads), None
    planner = _HeadPlanner(keys, values, group, options, costs)
    # also for heads of which all keys are read: it takes least to build and to store
    flat = FlatIndex().build(keys, threads=threads)
    planner.indexes = [flat]
    kind = planner.measured_plan(sample, keys.shape[0]).kind
    if kind in ("coarse", "graph"):
        built = _CLASSES[kind]().build(keys, taught, seed=seed, threads=threads)
        planner.indexes.append(built)
        if planner.measured_plan(sample, keys.shape[0], ("full", "flat", kind)).kind == kind:
            return built, planner.head_plan(built, train_queries, sample)
    return flat, planner.head_plan(flat, train_queries, sample)


class _HeadPlanner:
    """Plans a kv head, by its queries and by what indexes that are built find.

    Attributes:
        indexes: those that are built.
    """

    def __init__(
        self,
        keys: Elements,
        values: Elements,
        group: int,
        options: DBOptions,
        costs: SearchCost | None,
    ) -> None:
        self._keys, self._values, self._group, self._costs = keys, values, group, costs
        self._chosen = options.query if "query" in options.model_fields_set else None
        self._max_error = options.max_error
        self.indexes: list[CompiledIndex] = []

    def measured_plan(
        self, sample: np.ndarray, prefix_len: int, kinds: Sequence[str] = KINDS
    ) -> Plan:
        """For the first `prefix_len` keys and queries that came after them.

        A query that was asked for is asked: the target is then what its exact answer has.
        """
        keys, values = (part.rows(0, prefix_len) for part in (self._keys, self._values))
        types = DEFAULT_QUERIES
        if self._chosen is not None:
            types = (replace(self._chosen, width=None),)
        profile = profile_head(keys, sample, values, query_types=types)
        answers, max_error = profile.answers, 0.0
        if self._chosen is None:
            answers, max_error = profile.promising(self._max_error), self._max_error
        exact = exact_attention(keys, values, sample)
        # not timed: a context that is stored again gets the same index
        searches: list[MeasuredSearch] = []
        for index in self.indexes:
            searches += measure_index(
                index,
                self._values,
                exact,
                answers,
                prefix_len=prefix_len,
                max_error=max_error,
                least_width=index.default_width,
            )
        measured = profile.with_searches(searches)
        num_keys = self._keys.shape[0]
        if self._chosen is None:
            return plan(
                num_keys, prefix_len, measured, max_error=self._max_error, kinds=kinds,
                costs=self._costs,
            )  # fmt: skip
        return plan(
            num_keys, prefix_len, measured, kinds=[kind for kind in kinds if kind != "full"],
            min_mass=max(0.0, profile.answers[0].mass_p1 - _LOST_MASS), costs=self._costs,
        )  # fmt: skip

    def head_plan(
        self, index: CompiledIndex, train_queries: Elements, sample: np.ndarray
    ) -> HeadPlan:
        """For the whole context and for parts of it, with this index."""
        self.indexes = [index]
        kinds = ("full", index.kind)
        num_keys, num_queries = self._keys.shape[0], train_queries.shape[0]
        whole = self.measured_plan(sample, num_keys, kinds)
        by_prefix = {num_keys: whole.query}
        for share in PLANNED_SHARES:
            part, _ = hold_out(train_queries.rows(0, round(num_queries * share)), self._group)
            prefix_len = round(num_keys * share)
            if part is not None and prefix_len >= 1:
                by_prefix[prefix_len] = self.measured_plan(part, prefix_len, kinds).query
        return HeadPlan(tuple(sorted(by_prefix.items())), whole.explain())


def hold_out(
    train_queries: Elements | None, group: int
) -> tuple[np.ndarray | None, Elements | None]:
    """(queries for the profile [tokens, group, d], the others [m, d]).

    The queries of one token are not kept together, so that those of neighbouring ones stand in:
    as many in a row as the group has heads, of the last quarter, which has seen most of the keys.
    """
    if train_queries is None:
        return None, None
    num_queries = train_queries.shape[0]
    tokens = min(PROFILE_TOKENS, num_queries // (_PROFILE_SHARE * group))
    if tokens == 0:
        return None, train_queries
    first = num_queries - max(num_queries // 4, tokens * group)
    begins = np.linspace(first, num_queries - group, tokens).astype(np.int64)
    chosen = begins[:, None] + np.arange(group)
    rows = train_queries.to_float32()
    kept = np.ones(num_queries, bool)
    kept[chosen] = False
    rest = Elements(np.ascontiguousarray(train_queries.data[kept]), train_queries.dtype)
    return rows[chosen], rest

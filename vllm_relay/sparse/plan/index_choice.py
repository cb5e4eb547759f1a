# SPDX-License-Identifier: Apache-2.0
"""Which index a kv head gets, and what its queries ask of it."""

from __future__ import annotations

import numpy as np

from vllm_relay.sparse.index.blocks import BlockIndex
from vllm_relay.sparse.index.coarse import CoarseIndex
from vllm_relay.sparse.index.compiled_index import CompiledIndex
from vllm_relay.sparse.index.elements import Elements
from vllm_relay.sparse.index.flat import FlatIndex
from vllm_relay.sparse.index.graph import GraphIndex
from vllm_relay.sparse.index.key_index import KeyIndex
from vllm_relay.sparse.plan.head_plan import HeadPlan
from vllm_relay.sparse.plan.options import DBOptions
from vllm_relay.sparse.plan.prefix_planner import PrefixPlanner, profile_rows
from vllm_relay.sparse.plan.search_cost import KINDS, SearchCost

_CLASSES: dict[str, type[CompiledIndex]] = {
    "flat": FlatIndex,
    "blocks": BlockIndex,
    "coarse": CoarseIndex,
    "graph": GraphIndex,
}
PLANNED_SHARES = (1.0, 0.5, 0.25)
"""Of the context that may be reused."""


def index_for_layer(layer_idx: int, options: DBOptions) -> KeyIndex:
    """An unbuilt index; by the rules of the paper where there is nothing to plan by: a flat one
    for the first layer, which reads many keys, and a graph for the others.

    Source: AlayaDB (2504.10326), section 6.2, the rules of figure 8.
    """
    if options.index_factory is not None:
        made = options.index_factory(layer_idx)
        if not isinstance(made, KeyIndex):
            raise ValueError(
                f"index_factory: returned {made!r} for layer {layer_idx}, expected an unbuilt "
                "KeyIndex"
            )
        return made
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
    last_queries: np.ndarray | None = None,
) -> tuple[KeyIndex, HeadPlan | None]:
    """Builds the index of a kv head and, with `index="auto"`, plans what is asked of it.

    Args:
        keys, values: [n, d] and [n, value_size].
        train_queries: [m, d], in token order, the query heads of the group in turn. Without
            enough of them there is no plan.
        group: query heads that share the keys.
        costs: None for what was measured on this machine, or ships.
        last_queries: float32 [t, group, d]; of the last tokens. They ask as the tokens do that
            follow the context, where queries of earlier tokens look for what was next to them: a
            plan goes by these, then, and is made for the whole context only.
    """
    seed, threads = options.seed, options.threads
    taught: Elements | None = None
    planners: list[PrefixPlanner] = []
    if train_queries is not None and options.index == "auto" and options.index_factory is None:
        if last_queries is None:
            taught, planners = _planners(keys, values, train_queries, group, options, costs)
        else:
            taught, planners = _last_planner(
                keys, values, train_queries, last_queries, options, costs
            )
    if not planners:
        unbuilt = index_for_layer(layer_idx, options)
        return unbuilt.build(keys, train_queries, seed=seed, threads=threads), None
    whole, *parts = planners
    # also for heads of which all keys are read: it takes least to build and to store
    index: CompiledIndex = FlatIndex().build(keys, threads=threads)
    searches = whole.searches(index)
    kind = whole.plan(searches, KINDS).kind
    if kind in ("coarse", "graph"):
        hoped_for = _CLASSES[kind]().build(keys, taught, seed=seed, threads=threads)
        found = whole.searches(hoped_for)
        if whole.plan([*searches, *found], ("full", "flat", kind)).kind == kind:
            index, searches = hoped_for, found
    built = ("full", index.kind)
    chosen = whole.plan(searches, built)
    by_prefix = {part.prefix_len: part.plan(part.searches(index), built).query for part in parts}
    by_prefix[whole.prefix_len] = chosen.query
    max_error = options.max_error if options.given_query is None else None
    return index, HeadPlan(tuple(sorted(by_prefix.items())), chosen.explain(), max_error)


def _planners(
    keys: Elements,
    values: Elements,
    train_queries: Elements,
    group: int,
    options: DBOptions,
    costs: SearchCost | None,
) -> tuple[Elements, list[PrefixPlanner]]:
    """The queries that are left to learn from, and a planner for each of `PLANNED_SHARES` that has
    enough queries: none if the whole has not."""
    num_keys, num_queries = keys.shape[0], train_queries.shape[0]
    rows = train_queries.to_float32()
    kept_back, planners = [], []
    for share in PLANNED_SHARES:
        chosen = profile_rows(round(num_queries * share), group)
        prefix_len = round(num_keys * share)
        if len(chosen) == 0 or prefix_len == 0:
            break
        kept_back.append(chosen.ravel())
        planners.append(PrefixPlanner(keys, values, prefix_len, rows[chosen], options, costs))
    if not planners:
        return train_queries, []
    left = np.delete(train_queries.data, np.concatenate(kept_back), axis=0)
    return Elements(left, train_queries.dtype), planners


def _last_planner(
    keys: Elements,
    values: Elements,
    train_queries: Elements,
    last_queries: np.ndarray,
    options: DBOptions,
    costs: SearchCost | None,
) -> tuple[Elements, list[PrefixPlanner]]:
    """The queries of earlier tokens, to learn from, and a planner that goes by the last ones: what
    they look for among the keys before them."""
    num_keys, num_queries = keys.shape[0], train_queries.shape[0]
    seen_len = num_keys - len(last_queries)
    if seen_len < 1 or not len(last_queries):
        return train_queries, []
    taught = train_queries.rows(0, num_queries * seen_len // num_keys)
    planner = PrefixPlanner(keys, values, num_keys, last_queries, options, costs, seen_len=seen_len)
    return taught, [planner]

# SPDX-License-Identifier: Apache-2.0
"""Which index a kv head gets, and what its queries ask of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from vllm_relay.sparse.index.blocks import BlockIndex
from vllm_relay.sparse.index.coarse import CoarseIndex
from vllm_relay.sparse.index.compiled_index import CompiledIndex
from vllm_relay.sparse.index.elements import Elements
from vllm_relay.sparse.index.flat import FlatIndex
from vllm_relay.sparse.index.graph import GraphIndex
from vllm_relay.sparse.index.key_index import KeyIndex
from vllm_relay.sparse.index.query_types import QueryType
from vllm_relay.sparse.plan.head_plan import HeadPlan
from vllm_relay.sparse.plan.head_sample import HeadSample
from vllm_relay.sparse.plan.head_ways import (
    LOST_MASS,
    expected_work,
    explain,
    fastest,
    way_to_ask,
    ways_to_keep_error,
)
from vllm_relay.sparse.plan.options import DBOptions
from vllm_relay.sparse.plan.search_cost import SearchCost, load_costs

_CLASSES: dict[str, type[CompiledIndex]] = {
    "flat": FlatIndex,
    "blocks": BlockIndex,
    "coarse": CoarseIndex,
    "graph": GraphIndex,
}
PLANNED_SHARES = (1.0, 0.5, 0.25)
"""Of the context that may be reused."""
SAMPLE_TOKENS = 192
"""Of which the queries of all heads of the group are looked at."""
_SAMPLE_SHARE = 8
"""One of so many training queries of a prefix, at most, is kept back for its plan."""


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
    samples: dict[int, HeadSample] = {}
    if train_queries is not None and options.index == "auto" and options.index_factory is None:
        if last_queries is None:
            taught, samples = _samples(keys, values, train_queries, group)
        else:
            taught, samples = _last_sample(keys, values, train_queries, last_queries)
    if not samples:
        unbuilt = index_for_layer(layer_idx, options)
        return unbuilt.build(keys, train_queries, seed=options.seed, threads=options.threads), None
    costs = load_costs() if costs is None else costs
    # also for heads of which all keys are read: it takes least to build and to store
    flat = FlatIndex().build(keys, threads=options.threads)
    if options.given_query is None:
        return flat, _plan_for_error(samples, flat, options.max_error, costs)
    query = replace(options.given_query, width=None)
    return _plan_for_query(samples, flat, taught, query, options, costs)


def _plan_for_error(
    samples: dict[int, HeadSample], flat: FlatIndex, max_error: float, costs: SearchCost
) -> HeadPlan:
    """Args: samples: by length of the prefix, the whole first."""
    ways = {
        length: ways_to_keep_error(sample, flat, max_error, costs)
        for length, sample in samples.items()
    }
    by_prefix = sorted((length, fastest(each).query) for length, each in ways.items())
    return HeadPlan(tuple(by_prefix), explain(next(iter(ways.values()))), max_error)


def _plan_for_query(
    samples: dict[int, HeadSample],
    flat: FlatIndex,
    taught: Elements,
    query: QueryType,
    options: DBOptions,
    costs: SearchCost,
) -> tuple[CompiledIndex, HeadPlan]:
    """The index that finds nearly all that `query` asks for in the shortest time, and its widths.

    Args:
        samples: by length of the prefix, the whole first.
        taught: queries that an index may learn from.
    """
    whole = next(iter(samples.values()))
    exact = whole.search(flat, query)
    index: CompiledIndex = flat
    ways = [way_to_ask(whole, flat, query, 0.0, costs)]
    works = [exact.work, *(expected_work(kind, exact, whole) for kind in ("coarse", "graph"))]
    best = min(works, key=lambda work: costs.time_us(work, **whole.row_sizes))
    if best is not exact.work:  # else a flat one is expected to be the fastest
        hoped_for = _CLASSES[best.kind]().build(
            flat.keys, taught, seed=options.seed, threads=options.threads
        )
        ways.append(way_to_ask(whole, hoped_for, query, exact.mass_p1 - LOST_MASS, costs))
        if fastest(ways).kind == best.kind:
            index = hoped_for
    by_prefix = {}
    for length, sample in samples.items():
        min_mass = sample.search(flat, query).mass_p1 - LOST_MASS
        by_prefix[length] = way_to_ask(sample, index, query, min_mass, costs).query
    return index, HeadPlan(tuple(sorted(by_prefix.items())), explain(ways), None)


def _samples(
    keys: Elements, values: Elements, train_queries: Elements, group: int
) -> tuple[Elements, dict[int, HeadSample]]:
    """The queries that are left to learn from, and by length of the prefix a sample for each of
    `PLANNED_SHARES` that has enough queries: none if the whole has not."""
    num_keys, num_queries = keys.shape[0], train_queries.shape[0]
    rows = train_queries.to_float32()
    kept_back, samples = [], {}
    for share in PLANNED_SHARES:
        chosen = sample_rows(round(num_queries * share), group)
        prefix_len = round(num_keys * share)
        if len(chosen) == 0 or prefix_len == 0:
            break
        kept_back.append(chosen.ravel())
        samples[prefix_len] = HeadSample(keys, values, rows[chosen], prefix_len)
    if not samples:
        return train_queries, {}
    left = np.delete(train_queries.data, np.concatenate(kept_back), axis=0)
    return Elements(left, train_queries.dtype), samples


def _last_sample(
    keys: Elements, values: Elements, train_queries: Elements, last_queries: np.ndarray
) -> tuple[Elements, dict[int, HeadSample]]:
    """The queries of earlier tokens, to learn from, and what the last ones look for among the keys
    before them."""
    num_keys, num_queries = keys.shape[0], train_queries.shape[0]
    seen_len = num_keys - len(last_queries)
    if seen_len < 1 or not len(last_queries):
        return train_queries, {}
    taught = train_queries.rows(0, num_queries * seen_len // num_keys)
    return taught, {num_keys: HeadSample(keys, values, last_queries, seen_len)}


def sample_rows(num_queries: int, group: int) -> np.ndarray:
    """int64 [tokens, group]; which of the training queries of a prefix its plan goes by.

    The queries of one token are not kept together, so that those of neighbouring ones stand in:
    as many in a row as the group has heads, of the last quarter, which has seen most of the keys.

    Args:
        num_queries: of the prefix, in token order, the query heads of the group in turn.
    """
    tokens = min(SAMPLE_TOKENS, num_queries // (_SAMPLE_SHARE * group))
    first = num_queries - max(num_queries // 4, tokens * group)
    begins = np.linspace(first, num_queries - group, tokens).astype(np.int64)
    return begins[:, None] + np.arange(group)

# SPDX-License-Identifier: Apache-2.0
"""Which index a kv head gets, and what its queries ask of it: of the ways to attend a context the
fastest that is good enough."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from vllm_relay.sparse.index.blocks import BlockIndex
from vllm_relay.sparse.index.coarse import CoarseIndex, default_num_lists
from vllm_relay.sparse.index.compiled_index import CompiledIndex
from vllm_relay.sparse.index.elements import Elements
from vllm_relay.sparse.index.flat import FlatIndex
from vllm_relay.sparse.index.graph import HUB_HEAVY, GraphIndex
from vllm_relay.sparse.index.key_index import KeyIndex
from vllm_relay.sparse.index.query_types import Dipr, QueryType, TopK
from vllm_relay.sparse.plan.head_plan import HeadPlan
from vllm_relay.sparse.plan.head_sample import Found, HeadSample
from vllm_relay.sparse.plan.options import DBOptions
from vllm_relay.sparse.plan.search_cost import SearchCost, SearchWork, load_costs

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
LOST_MASS = 0.01
"""Attention weight that an index may lose of the answer to a query that was asked for."""
_MASSES_PER_ERROR = (1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32)
_WIDTH_STEP = 1.4
_MOST_DISTANCES = 0.6
"""Of the keys: a graph whose search scores more is slower than reading all of them in order."""

# how indexes that nobody has built yet do, on average over the heads of benchmarks/sparse
_RESCORED_PER_FOUND, _RESCORED_PER_QUERY = 3.0, 20.0
_NEW_KEYS_PER_HOP, _NEW_KEYS_PER_HUB_HOP = 15.0, 7.0
_SEEDS = 148
"""As many keys as every search of a graph begins with (csrc/index/graph_search.h)."""
_GRAPH_WIDTH_PER_TOKEN, _LEAST_GRAPH_WIDTH = 1.5, 60
_LISTS_SHARE, _LISTS_PER_TOKEN = 0.1, 0.15
_SHARED_BY_GROUP = 0.15
"""What a further query of a group adds to the work of a search."""


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


@dataclass(frozen=True)
class Way:
    """A way that was looked at.

    Attributes:
        kind: of the index, or "full".
        query: with its width; None for "full".
        expected_us: of one thread, for a search of the group and the attention over its answer.
        problem: why it was ruled out, whatever its time; empty if it was not.
    """

    kind: str
    query: QueryType | None
    expected_us: float
    quality: str
    problem: str = ""

    def __str__(self) -> str:
        asked = "all keys" if self.query is None else _described(self.query)
        return f"{self.kind}, {asked}: {self.expected_us:.0f} us, {self.quality}"


def fastest(ways: Sequence[Way]) -> Way:
    """Of those that are good enough; one is."""
    return min((way for way in ways if not way.problem), key=lambda way: way.expected_us)


def explain(ways: Sequence[Way]) -> str:
    """The choice and, one line each, what else there was and why it was not taken."""
    chosen = fastest(ways)
    lines = [f"{chosen}: the fastest that is good enough"]
    for other in sorted(ways, key=lambda way: way.expected_us):
        if other is not chosen:
            slower = other.expected_us / max(chosen.expected_us, 1e-9)
            lines.append(f"not {other}: {other.problem or f'{slower:.2f} times as long'}")
    return "\n".join(lines)


def ways_to_keep_error(
    sample: HeadSample, index: FlatIndex, max_error: float, costs: SearchCost
) -> list[Way]:
    """Reading everything, and an exact scan that leaves out little enough of the attention weight.

    The scan computes for every query what it leaves out. How far off the output is with so much
    left out, the sample tells: queries differ little in that, where ranges and approximate indexes
    may do well for a whole sample and miss all that the next query looks for. It begins with half
    of `max_error`: what is left out of an output that few keys make may be as long as the output.
    """
    full_work = SearchWork(
        "full", sample.num_keys, sample.group, found=sample.num_keys * sample.group
    )
    full = Way("full", None, costs.time_us(full_work, **sample.row_sizes), "error 0.00%")
    ways = [full]
    for share in _MASSES_PER_ERROR if max_error > 0 else ():
        query = Dipr(alpha=1.0, max_dropped_mass=share * max_error)
        found = sample.search(index, query)
        is_good = found.error_upper <= max_error
        problem = "" if is_good else f"error above {max_error:.2%}"
        quality = f"error {found.error_upper:.2%}"
        expected_us = costs.time_us(found.work, **sample.row_sizes)
        ways.append(Way("flat", query, expected_us, quality, problem))
        if is_good or expected_us >= full.expected_us:
            break
    return ways


def way_to_ask(
    sample: HeadSample, index: CompiledIndex, query: QueryType, min_mass: float, costs: SearchCost
) -> Way:
    """At the smallest width of which 99% of the queries get `min_mass` of their attention weight.

    No narrower than the index searches by default: a needle that one query in a thousand looks for
    is in no sample.
    """
    for width in _widths(index, query):
        asked = replace(query, width=width)
        found = sample.search(index, asked)
        is_good = width is None or found.mass_p1 >= min_mass
        is_slow = index.kind == "graph" and found.work.distances > _MOST_DISTANCES * sample.num_keys
        if is_good or is_slow:
            break
    problem = "" if is_good else f"mass below {min_mass:.4f}"
    expected_us = costs.time_us(found.work, **sample.row_sizes)
    return Way(index.kind, asked, expected_us, f"mass {found.mass_p1:.4f}", problem)


def expected_work(kind: str, exact: Found, sample: HeadSample) -> SearchWork:
    """What a search of a coarse index or a graph would do that is not built.

    Args:
        exact: what a flat index finds for the same queries.
    """
    n, group = sample.num_keys, sample.group
    found = exact.work.found
    rescored = min(_RESCORED_PER_FOUND * found + _RESCORED_PER_QUERY * group, n * group)
    union = 1 + _SHARED_BY_GROUP * (group - 1)
    if kind == "coarse":
        centres = default_num_lists(n)
        lists = 4 + round(_LISTS_SHARE * centres + _LISTS_PER_TOKEN * exact.tokens_p99)
        read = min(centres, lists * union)
        scored = centres + n * read / centres
        return SearchWork(kind, n, group, scored, read, centres, rescored, found)
    width = max(_LEAST_GRAPH_WIDTH, _GRAPH_WIDTH_PER_TOKEN * exact.tokens_p99)
    hops = min(n, max(min(width, n), 1.1 * found / group) * union)
    is_hub_heavy = sample.hub_statistic < HUB_HEAVY
    per_hop = _NEW_KEYS_PER_HUB_HOP if is_hub_heavy else _NEW_KEYS_PER_HOP
    scored = min(n, _SEEDS + n * (1 - math.exp(-per_hop * hops / n)))
    return SearchWork(kind, n, group, scored, hops, 0, rescored, found)


def _widths(index: CompiledIndex, query: QueryType) -> Iterator[int | None]:
    """Rising; None for an index that has no width."""
    if index.kind == "flat":
        yield None
        return
    most = index.num_lists if isinstance(index, CoarseIndex) else index.num_keys
    width = index.width_of(replace(query, width=None))
    while width < most:
        yield width
        width = math.ceil(_WIDTH_STEP * width)
    yield most


def _described(query: QueryType) -> str:
    if isinstance(query, TopK):
        text = f"best {query.k}"
    elif query.max_dropped_mass is not None:
        text = f"all but {query.max_dropped_mass:.2g} of the mass"
    elif query.alpha is not None:
        text = f"range alpha={query.alpha:g}"
    else:
        text = f"range beta={query.beta:g}"
    return text if query.width is None else f"{text} width {query.width}"

# SPDX-License-Identifier: Apache-2.0
"""The ways to attend a context that a plan chooses from: what each takes, and whether it is good
enough."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from vllm_relay.sparse.index.coarse import CoarseIndex, default_num_lists
from vllm_relay.sparse.index.compiled_index import CompiledIndex
from vllm_relay.sparse.index.flat import FlatIndex
from vllm_relay.sparse.index.graph import HUB_HEAVY
from vllm_relay.sparse.index.query_types import Dipr, QueryType, TopK
from vllm_relay.sparse.plan.head_sample import Found, HeadSample
from vllm_relay.sparse.plan.search_cost import SearchCost, SearchWork

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

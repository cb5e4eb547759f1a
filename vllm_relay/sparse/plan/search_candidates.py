# SPDX-License-Identifier: Apache-2.0
"""The ways to search a head that a plan chooses from: what each finds and what it does for it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from vllm_relay.sparse.index.coarse import default_num_lists
from vllm_relay.sparse.index.query_types import QueryType
from vllm_relay.sparse.plan.head_profile import ExactAnswer, HeadProfile, MeasuredSearch
from vllm_relay.sparse.plan.search_cost import SearchWork

HUB_HEAVY = 0.3
"""As in `graph`: below this hub statistic a graph has more edges, and a hop finds fewer keys."""

# how indexes that nobody has built yet do, on average over the heads of benchmarks/sparse
_RESCORED_PER_FOUND, _RESCORED_PER_QUERY = 3.0, 20.0
_NEW_KEYS_PER_HOP, _NEW_KEYS_PER_HUB_HOP = 15.0, 7.0
_SEEDS = 148
"""As many keys as every search of a graph begins with (csrc/index/graph_search.h)."""
_GRAPH_WIDTH_PER_TOKEN, _LEAST_GRAPH_WIDTH = 1.5, 60
_LISTS_SHARE, _LISTS_PER_TOKEN = 0.1, 0.15
_SHARED_BY_GROUP = 0.15
"""What a further query of a group adds to the work of a search."""
_LOST_MASS, _ERROR_GROWTH = 0.005, 1.1
"""What an approximate answer lacks of the exact one, and its error relative to that one's."""


@dataclass(frozen=True)
class Candidate:
    """One way to attend a prefix of a context.

    Attributes:
        query: with its width; None where everything is read.
        error, mass: as `error_bound` and `mass_p1` of a profile.
        is_measured: by searches of a built index, not expected from the profile.
        measured: (work, microseconds) of the search it is known by, if that was timed.
    """

    query: QueryType | None
    work: SearchWork
    error: float | None
    mass: float
    is_measured: bool
    measured: tuple[SearchWork, float] | None = None

    @property
    def kind(self) -> str:
        return self.work.kind


def candidates(
    profile: HeadProfile, context_len: int, prefix_len: int, kinds: tuple[str, ...]
) -> Iterator[Candidate]:
    """Ways to read the first `prefix_len` of `context_len` tokens.

    A shorter prefix means less work, but not for all alike: a scan reads it only, and less is
    found. The best lists of a coarse index may lie behind it, so it takes as many more of them,
    each with as many fewer keys. A graph's search goes as far as ever, and around the keys behind
    the prefix. Neither scores more keys than there are.
    """
    group = profile.group_size
    for kind in kinds:
        measured = [search for search in profile.searches if search.kind == kind]
        if kind == "full":
            error = None if profile.answers and profile.answers[0].error_p99 is None else 0.0
            times = [search.time_us for search in measured if search.time_us is not None]
            known = (_full_work(profile.prefix_len, group), times[0]) if times else None
            yield Candidate(None, _full_work(prefix_len, group), error, 1.0, True, known)
            continue
        for search in measured:
            yield _candidate(search, profile, context_len, prefix_len, True)
        if measured:
            continue
        for answer in profile.answers:
            search = _expected(kind, answer, profile)
            yield _candidate(search, profile, context_len, prefix_len, kind == "flat")


def _candidate(
    search: MeasuredSearch,
    profile: HeadProfile,
    context_len: int,
    prefix_len: int,
    is_measured: bool,
) -> Candidate:
    query = search.query
    if search.kind == "coarse" and query is not None and query.width is not None:
        width = math.ceil(query.width * max(1.0, profile.prefix_len / prefix_len))
        query = replace(query, width=min(width, default_num_lists(context_len)))
    work = _work(search, profile, context_len, prefix_len)
    known = None
    if search.time_us is not None:
        known = (_work(search, profile, context_len, profile.prefix_len), search.time_us)
    return Candidate(query, work, search.error_bound, search.mass_p1, is_measured, known)


def _full_work(prefix_len: int, group: int) -> SearchWork:
    return SearchWork("full", prefix_len, group, found=prefix_len * group)


def _work(
    search: MeasuredSearch, profile: HeadProfile, context_len: int, prefix_len: int
) -> SearchWork:
    """Of a search that was measured over the prefix of the profile."""
    ratio = prefix_len / profile.prefix_len
    most = float(prefix_len * profile.group_size)
    found = min(search.found * math.sqrt(ratio), most)
    rescored = min(search.rescored * math.sqrt(ratio), most)
    if search.kind == "flat":
        return SearchWork("flat", prefix_len, profile.group_size, prefix_len, 1, 0, rescored, found)
    if search.kind == "coarse":
        centres = default_num_lists(context_len)
        scanned = max(0.0, search.distances - centres) * max(1.0, ratio)
        scanned, hops = min(scanned, prefix_len), search.hops
        return SearchWork(
            "coarse", context_len, profile.group_size, centres + scanned, hops, centres,
            rescored, found,
        )  # fmt: skip
    distances = min(search.distances * max(1.0, ratio) ** 0.3, prefix_len)
    hops = min(search.hops, prefix_len)
    return SearchWork(
        "graph", context_len, profile.group_size, distances, hops, 0, rescored, found,
        hops * (1 - prefix_len / context_len),
    )  # fmt: skip


def _expected(kind: str, answer: ExactAnswer, profile: HeadProfile) -> MeasuredSearch:
    n, group = profile.prefix_len, profile.group_size
    found = answer.mean_tokens * group
    rescored = min(_RESCORED_PER_FOUND * found + _RESCORED_PER_QUERY * group, n * group)
    exact = MeasuredSearch(
        "flat", answer.query, n, 1, rescored, found, answer.mass_mean, answer.mass_p1,
        answer.error_p99, answer.error_max, error_p99_upper=answer.error_p99_upper,
    )  # fmt: skip
    if kind == "flat":
        return exact
    width, distances, hops = _expected_effort(
        kind, n, group, answer.mean_tokens, answer.tokens.p99,
        is_hub_heavy=profile.hub_statistic < HUB_HEAVY,
    )  # fmt: skip
    return replace(
        exact,
        kind=kind,
        query=replace(answer.query, width=max(1, width)),
        distances=distances,
        hops=hops,
        mass_p1=max(0.0, answer.mass_p1 - _LOST_MASS),
        error_p99=_grown(answer.error_p99),
        error_p99_upper=_grown(answer.error_p99_upper),
    )


def _expected_effort(
    kind: str,
    num_keys: int,
    group: int,
    mean_tokens: float,
    p99_tokens: float,
    *,
    is_hub_heavy: bool,
) -> tuple[int, float, float]:
    """Width, scored keys and hops of a search of a coarse index or a graph.

    Args:
        mean_tokens, p99_tokens: that the exact answer to a query has.
    """
    union = 1 + _SHARED_BY_GROUP * (group - 1)
    if kind == "coarse":
        centres = default_num_lists(num_keys)
        lists = min(centres, 4 + round(_LISTS_SHARE * centres + _LISTS_PER_TOKEN * p99_tokens))
        read = min(centres, lists * union)
        return lists, float(centres + num_keys * read / centres), float(read)
    width = min(num_keys, round(max(_LEAST_GRAPH_WIDTH, _GRAPH_WIDTH_PER_TOKEN * p99_tokens)))
    hops = min(num_keys, max(width, 1.1 * mean_tokens) * union)
    per_hop = _NEW_KEYS_PER_HUB_HOP if is_hub_heavy else _NEW_KEYS_PER_HOP
    distances = min(num_keys, _SEEDS + num_keys * (1 - math.exp(-per_hop * hops / num_keys)))
    return width, float(distances), float(hops)


def _grown(error: float | None) -> float | None:
    return None if error is None else _ERROR_GROWTH * error

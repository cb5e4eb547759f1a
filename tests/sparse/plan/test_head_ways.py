# SPDX-License-Identifier: Apache-2.0
"""What is chosen, and what makes the choice another one."""

from __future__ import annotations

import numpy as np
import pytest

from tests.sparse.planned_heads import COSTS, costs_with_cheap
from vllm_relay.sparse import CoarseIndex, Dipr, FlatIndex, GraphIndex, QueryType, TopK
from vllm_relay.sparse.index.elements import from_float32
from vllm_relay.sparse.plan.head_sample import HeadSample
from vllm_relay.sparse.plan.index_choice import (
    LOST_MASS,
    Way,
    expected_work,
    explain,
    fastest,
    way_to_ask,
    ways_to_keep_error,
)

KEYS, GROUP, SIZE = 2000, 2, 32


def _sample(deviation: float = 2.0, tokens: int = 100, num_keys: int = KEYS) -> HeadSample:
    rng = np.random.default_rng(0)
    keys, values = rng.standard_normal((2, KEYS, SIZE), np.float32)
    queries = np.float32(deviation) * rng.standard_normal((tokens, GROUP, SIZE), np.float32)
    stored = from_float32(keys, "float32"), from_float32(values, "float32")
    return HeadSample(*stored, queries, num_keys)


def _flat() -> FlatIndex:
    keys = np.random.default_rng(0).standard_normal((2, KEYS, SIZE), np.float32)[0]
    return FlatIndex().build(from_float32(keys, "float32"))


def _way(us: float, problem: str = "", kind: str = "flat") -> Way:
    return Way(kind, None if kind == "full" else TopK(5), us, "mass 0.9", problem)


def test_the_fastest_of_those_that_are_good_enough_is_taken() -> None:
    ways = [_way(5, "error above 1.00%"), _way(30), _way(20, kind="full"), _way(25)]
    assert fastest(ways) is ways[2]
    lines = explain(ways).splitlines()
    assert lines[0] == "full, all keys: 20 us, mass 0.9: the fastest that is good enough"
    assert lines[1] == "not flat, best 5: 5 us, mass 0.9: error above 1.00%"
    assert lines[2].endswith("1.25 times as long") and lines[3].endswith("1.50 times as long")


@pytest.mark.parametrize("max_error", [0.003, 0.03, 0.3])
def test_a_scan_leaves_out_no_more_than_half_of_the_error(max_error: float) -> None:
    ways = ways_to_keep_error(_sample(), _flat(), max_error, costs_with_cheap("flat"))
    chosen = fastest(ways)
    assert isinstance(chosen.query, Dipr) and chosen.query.max_dropped_mass is not None
    assert chosen.query.max_dropped_mass <= max_error / 2
    found = _sample().search(_flat(), chosen.query)
    assert found.error_upper <= max_error and found.mass_p1 >= 1 - max_error / 2
    assert all(way.problem for way in ways if way.query not in (None, chosen.query))


def test_where_a_scan_would_take_longer_everything_is_read() -> None:
    assert (
        fastest(ways_to_keep_error(_sample(), _flat(), 0.1, costs_with_cheap("full"))).query is None
    )
    spread_out = ways_to_keep_error(_sample(0.05), _flat(), 0.01, COSTS)
    assert fastest(spread_out).query is None


@pytest.mark.parametrize("max_error", [0.0, 1e-9])
def test_no_error_is_that_of_reading_everything(max_error: float) -> None:
    ways = ways_to_keep_error(_sample(), _flat(), max_error, costs_with_cheap("flat"))
    assert fastest(ways).kind == "full"


def test_the_fewer_queries_tell_the_less_is_left_out() -> None:
    masses = []
    for tokens in (1, 8, 100):
        ways = ways_to_keep_error(_sample(tokens=tokens), _flat(), 0.1, costs_with_cheap("flat"))
        query = fastest(ways).query
        assert query is not None and query.max_dropped_mass is not None
        masses.append(query.max_dropped_mass)
    assert masses == sorted(masses) and masses[0] < masses[-1]


@pytest.mark.parametrize("index_class", [CoarseIndex, GraphIndex])
@pytest.mark.parametrize("query", [Dipr(alpha=0.05), TopK(60)])
def test_the_first_width_that_finds_enough(
    index_class: type[CoarseIndex] | type[GraphIndex], query: QueryType
) -> None:
    sample, flat = _sample(), _flat()
    index = index_class().build(flat.keys, sample.queries.reshape(-1, SIZE))
    min_mass = sample.search(flat, query).mass_p1 - LOST_MASS
    narrow, least = way_to_ask(sample, index, query, 0.0, COSTS), index.width_of(query)
    assert narrow.query is not None and narrow.query.width == least and not narrow.problem
    way = way_to_ask(sample, index, query, min_mass, COSTS)
    assert way.query is not None and way.query.width is not None and way.query.width >= least
    assert way.expected_us >= narrow.expected_us
    if not way.problem:
        assert sample.search(index, way.query).mass_p1 >= min_mass
    hopeless = way_to_ask(sample, index, query, 1.1, COSTS)
    assert hopeless.problem == "mass below 1.1000"


def test_an_exact_index_has_no_width() -> None:
    way = way_to_ask(_sample(), _flat(), TopK(9), 1.1, COSTS)
    assert way.query == TopK(9) and not way.problem


def test_a_shorter_prefix_makes_a_scan_faster() -> None:
    whole, part = _sample(), _sample(num_keys=KEYS // 4)
    query = Dipr(alpha=0.05)
    times = [way_to_ask(s, _flat(), query, 0.0, COSTS).expected_us for s in (part, whole)]
    assert times[0] < times[1]


@pytest.mark.parametrize("kind", ["coarse", "graph"])
def test_more_tokens_are_expected_to_take_longer(kind: str) -> None:
    sample = _sample()
    times = []
    for alpha in (0.3, 0.03, 0.003):
        work = expected_work(kind, sample.search(_flat(), Dipr(alpha=alpha)), sample)
        assert work.kind == kind and work.distances <= 2 * KEYS and work.hops <= KEYS
        times.append(COSTS.time_us(work, **sample.row_sizes))
    assert times == sorted(times)

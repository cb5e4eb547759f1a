# SPDX-License-Identifier: Apache-2.0
"""Profiles against plain float64, and measured indexes against their profiles."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from tests.sparse.planned_heads import answer as made_answer
from tests.sparse.planned_heads import head, search
from vllm_relay.sparse import BlockIndex, CoarseIndex, Dipr, FlatIndex, GraphIndex, QueryType, TopK
from vllm_relay.sparse.index.elements import from_float32
from vllm_relay.sparse.plan import index_measure
from vllm_relay.sparse.plan.answer_errors import SMALL_ERROR
from vllm_relay.sparse.plan.error_bound import error_p99_upper
from vllm_relay.sparse.plan.head_profile import HeadProfile, profile_head
from vllm_relay.sparse.plan.index_measure import exact_attention, measure_index, widths

KEYS, GROUP, SIZE = 700, 3, 32


def _states(seed: int = 0, deviation: float = 1.5) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    keys = rng.standard_normal((KEYS, SIZE), np.float32)
    values = rng.standard_normal((KEYS, SIZE), np.float32)
    queries = np.float32(deviation) * rng.standard_normal((10, GROUP, SIZE), np.float32)
    return keys, values, queries


def _plain(
    keys: np.ndarray, values: np.ndarray, query: np.ndarray, asked: QueryType, scale: float
) -> tuple[int, float, float]:
    """(tokens, mass, error) of one query."""
    keys, values, query = (each.astype(np.float64) for each in (keys, values, query))
    scores = keys @ query
    if isinstance(asked, TopK):
        chosen = np.argsort(-scores)[: asked.k]
    else:
        reach = -math.log(asked.alpha) / scale if asked.alpha else asked.beta
        chosen = np.flatnonzero(scores >= scores.max() - reach)
    weights = np.exp(scale * (scores - scores.max()))
    whole = weights @ values / weights.sum()
    part = weights[chosen] @ values[chosen] / weights[chosen].sum()
    error = np.linalg.norm(part - whole) / np.linalg.norm(whole)
    return len(chosen), weights[chosen].sum() / weights.sum(), float(error)


@pytest.mark.parametrize("deviation", [5.0, 1.5, 0.02], ids=["few", "some", "most tokens"])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_answers_are_those_of_plain_float64(deviation: float, scale: float | None) -> None:
    keys, values, queries = _states(deviation=deviation)
    asked = (Dipr(alpha=0.1), Dipr(alpha=0.01), Dipr(beta=9.0), TopK(40), TopK(300))
    found = profile_head(keys, queries, values, scale=scale, query_types=asked)
    used = scale or SIZE**-0.5
    for answer in found.answers:
        plain = np.array(
            [_plain(keys, values, q, answer.query, used) for q in queries.reshape(-1, SIZE)]
        )
        assert answer.mean_tokens == pytest.approx(plain[:, 0].mean(), rel=0.01)
        assert answer.tokens.median == pytest.approx(np.median(plain[:, 0]), abs=1)
        assert answer.mass_mean == pytest.approx(plain[:, 1].mean(), abs=1e-5)
        assert answer.mass_p1 == pytest.approx(np.quantile(plain[:, 1], 0.01), abs=1e-5)
        if answer.mass_mean > 0.81 and answer.error_max != 1:
            # an answer that holds one that errs little is said to err as much
            errors = plain[:, 2]
            for said, exact in (
                (answer.error_p99, np.quantile(errors, 0.99)),
                (answer.error_max, errors.max()),
                (answer.error_p99_upper, error_p99_upper(errors)),
            ):
                assert said == pytest.approx(exact, rel=2e-3) or exact <= said <= 4 * SMALL_ERROR
    assert (found.prefix_len, found.group_size, found.num_queries) == (KEYS, GROUP, 30)


def test_errors_of_answers_with_enough_mass_are_looked_at() -> None:
    keys, values, queries = _states()
    answers = profile_head(keys, queries, values).answers
    known = [each for each in answers if each.error_p99 is not None and each.error_p99 < 1]
    assert known and all(each.mass_p1 > 0.5 for each in known)
    unknown = profile_head(keys, queries).answers
    assert [each.error_p99 for each in unknown] == [None] * len(answers)
    assert unknown[0].expected_error == 1 - unknown[0].mass_p1


def test_tokens_for_mass_and_hubs() -> None:
    keys, _, queries = _states()
    rows = queries.reshape(-1, SIZE)
    weights = np.exp(rows @ keys.T / SIZE**0.5)
    shares = -np.sort(-weights, axis=1)
    shares /= shares.sum(axis=1, keepdims=True)
    found = profile_head(keys, queries)
    for mass, tokens in zip((0.9, 0.98, 0.99), found.tokens_for_mass, strict=True):
        counts = (shares.cumsum(axis=1) < mass).sum(axis=1) + 1
        assert tokens.median == pytest.approx(np.median(counts), abs=1)
    assert found.hub_statistic == len(set(weights.argmax(axis=1))) / len(rows)
    one_hub = np.concatenate([keys, 100 * np.ones((1, SIZE), np.float32)])
    assert profile_head(one_hub, np.abs(queries)).hub_statistic == pytest.approx(1 / 30)


def test_profiles_do_not_depend_on_how_queries_are_cut() -> None:
    keys, values, queries = _states()
    many = np.tile(queries, (5, 1, 1))
    grouped, single = profile_head(keys, many, values), profile_head(keys, many.reshape(-1, SIZE))
    assert single.group_size == 1
    assert grouped.tokens_for_mass == single.tokens_for_mass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keys": np.zeros((0, SIZE), np.float32)}, "keys: shape .0, 32., expected"),
        ({"queries": np.zeros((3, SIZE + 1), np.float32)}, "queries: shape .3, 33., expected"),
        ({"queries": np.zeros((0, SIZE), np.float32)}, "at least one"),
        ({"values": np.zeros((3, SIZE), np.float32)}, "values: shape .3, 32., expected .700"),
        ({"queries": np.full((1, SIZE), np.nan, np.float32)}, "queries: NaN or infinity"),
        ({"scale": 0}, "scale is 0, expected a positive number"),
        ({"scale": np.nan}, "scale is nan, expected"),
        ({"query_types": ()}, "query_types: there are none, expected at least one"),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], message: str) -> None:
    keys, values, queries = _states()
    with pytest.raises(ValueError, match=message):
        profile_head(**{"keys": keys, "queries": queries, "values": values, **arguments})


def test_a_profile_outlives_its_process() -> None:
    keys, values, queries = _states()
    profile = profile_head(keys, queries, values).with_searches(
        [search("graph", 80), search("full", None)]
    )
    assert HeadProfile.from_json(json.loads(json.dumps(profile.to_json()))) == profile
    for damage in ({"answers": None}, {"more": 1}, {"searches": [{}]}, {"prefix_len": 0}):
        with pytest.raises(ValueError, match="head profile: .*profile the head again|prefix_len"):
            HeadProfile.from_json({**profile.to_json(), **damage})


def test_new_measurements_replace_those_of_the_same_kind() -> None:
    first = head(1000).with_searches([search("graph", 80), search("coarse", 9)])
    second = first.with_searches([search("graph", 100)])
    assert [each.query.width for each in second.searches] == [9, 100]


def test_promising_answers_are_the_smallest_that_are_good_enough() -> None:
    chosen = head(1000).promising(0.01)
    assert [each.query for each in chosen] == [Dipr(alpha=0.01), Dipr(alpha=1e-3)]
    assert [each.query for each in head(1000).promising(0.01, most=1)] == [Dipr(alpha=0.01)]
    assert head(1000).promising(1e-6) == ()
    answers = (
        made_answer(0.01, 600, 0.009),
        made_answer(1e-3, 800, 1e-3),
        made_answer(1e-4, 900, 0),
    )
    most = head(1000, *answers)
    assert [each.query for each in most.promising(0.01)] == [Dipr(alpha=0.01)]
    assert [each.query for each in most.promising(0.005)] == [Dipr(alpha=1e-3)]


@pytest.mark.parametrize("index_class", [FlatIndex, BlockIndex, CoarseIndex, GraphIndex])
@pytest.mark.parametrize("prefix_len", [None, 400])
def test_measured_indexes_come_near_their_exact_answers(
    index_class: Any, prefix_len: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_measure, "MOST_DISTANCES", 2.0)
    keys, values, queries = _states()
    keys, values = from_float32(keys, "bfloat16"), from_float32(values, "bfloat16")
    train = np.random.default_rng(1).standard_normal((500, SIZE), np.float32)
    index = index_class().build(keys, 1.5 * train)
    seen = keys.rows(0, prefix_len or KEYS), values.rows(0, prefix_len or KEYS)
    # measuring ends near the error of the exact answer, which has to be small for that
    asked = (Dipr(alpha=1e-3), TopK(200))
    profile = profile_head(seen[0], queries, seen[1], query_types=asked)
    found = measure_index(
        index, values, exact_attention(*seen, queries), profile.answers, prefix_len=prefix_len
    )
    for answer in profile.answers:
        curve = [each for each in found if type(each.query) is type(answer.query)]
        assert curve[-1].mass_p1 == pytest.approx(answer.mass_p1, abs=0.05)
        assert all(each.mass_p1 <= answer.mass_p1 + 1e-3 for each in curve)
        assert [each.distances for each in curve] == sorted(each.distances for each in curve)
        assert curve[-1].found <= GROUP * (answer.mean_tokens + 1)
        assert curve[-1].error_p99 is not None and answer.error_p99 is not None
        assert curve[-1].error_p99 <= 1.1 * answer.error_p99 + 0.02
        if index.kind == "flat":
            assert len(curve) == 1 and curve[0].query.width is None
            assert curve[0].found == pytest.approx(GROUP * answer.mean_tokens, rel=0.01)


def test_lists_are_measured_up_to_all_of_them_and_graphs_while_they_score_few_keys() -> None:
    keys, values, queries = _states()
    stored = from_float32(values, "float32")
    prefix_len = KEYS // 5
    exact = exact_attention(keys[:prefix_len], values[:prefix_len], queries)
    asked = (Dipr(alpha=1e-4),)
    answers = profile_head(
        keys[:prefix_len], queries, values[:prefix_len], query_types=asked
    ).answers
    coarse = CoarseIndex(num_lists=20).build(keys)
    found = measure_index(coarse, stored, exact, answers, prefix_len=prefix_len)
    # all lists find what a scan finds; fewer miss some of what so small a prefix has
    assert found[-1].query == Dipr(alpha=1e-4, width=coarse.num_lists)
    assert found[-1].error_p99 == pytest.approx(answers[0].error_p99, abs=1e-3)
    graph = GraphIndex().build(keys)
    of_graph = measure_index(graph, stored, exact, answers, prefix_len=prefix_len)
    most = index_measure.MOST_DISTANCES * prefix_len
    assert [each.distances > most for each in of_graph[:-1]] == [False] * (len(of_graph) - 1)


def test_what_a_narrow_search_loses_widens_its_margin() -> None:
    keys, values, queries = _states()
    profile = profile_head(keys, queries, values, query_types=(Dipr(alpha=1e-3),))
    (exact,) = profile.answers
    found = measure_index(
        CoarseIndex(num_lists=20).build(keys), from_float32(values, "float32"),
        exact_attention(keys, values, queries), profile.answers, max_error=0.2,
    )  # fmt: skip
    assert exact.error_p99 is not None and exact.error_p99_upper is not None
    losing = 0
    for each in found:
        assert each.error_p99 is not None and each.error_bound is not None
        lost = each.error_p99 - exact.error_p99
        losing += lost > 0.01
        assert each.error_bound >= each.error_p99 + 2 * lost
    assert losing and found[-1].error_bound == pytest.approx(exact.error_p99_upper, rel=0.01)


def test_an_index_that_is_exact_errs_as_the_profile_says() -> None:
    keys, values, queries = _states()
    profile = profile_head(keys, queries, values)
    answers = profile.promising(0.3)
    found = measure_index(
        FlatIndex().build(keys), from_float32(values, "float32"),
        exact_attention(keys, values, queries), answers,
    )  # fmt: skip
    assert answers and len(found) == len(answers)
    for each, answer in zip(found, answers, strict=True):
        assert each.query == answer.query
        for name in ("error_p99", "error_p99_upper", "error_max", "mass_p1", "mass_mean"):
            assert getattr(each, name) == getattr(answer, name)
        assert each.found == GROUP * answer.mean_tokens
        assert each.rescored >= each.found / GROUP and each.distances == KEYS


def test_widths_begin_where_they_are_told_to() -> None:
    keys, values, queries = _states()
    index = CoarseIndex(num_lists=60).build(keys)
    assert list(widths(index))[:3] == [4, 6, 8] and list(widths(index))[-1] == index.num_lists
    assert list(widths(index, 20))[:2] == [20, 28]
    assert list(widths(index, 1000)) == [index.num_lists]
    assert list(widths(FlatIndex().build(keys), 20)) == [None]
    index.default_width = 30
    answers = profile_head(keys, queries, values).promising(0.5)
    found = measure_index(
        index, from_float32(values, "float32"), exact_attention(keys, values, queries), answers,
        max_error=0.5, from_default_width=True,
    )  # fmt: skip
    assert found and min(each.query.width for each in found) >= 30


def test_an_index_that_finds_too_little_is_known_to() -> None:
    keys, values, queries = _states()
    index = CoarseIndex(num_lists=200).build(keys)
    asked = (Dipr(alpha=1e-3),)
    profile = profile_head(keys, queries, values, query_types=asked)
    found = measure_index(
        index, from_float32(values, "float32"), exact_attention(keys, values, queries),
        profile.answers, max_error=1e-6,
    )  # fmt: skip
    assert found and found[-1].error_p99 is not None and found[-1].error_p99 > 1e-6

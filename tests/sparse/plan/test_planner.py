# SPDX-License-Identifier: Apache-2.0
"""What is chosen, and what makes the choice another one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sparse.planned_heads import COSTS, answer, head, search
from tests.support.depth import cases
from vllm_relay.sparse.index.query_types import Dipr
from vllm_relay.sparse.plan.head_profile import HeadProfile
from vllm_relay.sparse.plan.planner import Plan, plan
from vllm_relay.sparse.plan.search_cost import KINDS, SHIPPED, SearchCost, index_bytes

LONG = 100_000


def planned(profile: HeadProfile, prefix_len: int | None = None, **options: Any) -> Plan:
    return plan(LONG, prefix_len, profile, **{"costs": COSTS, **options})


def test_long_concentrated_heads_are_searched_and_tiny_contexts_read() -> None:
    assert planned(head(LONG)).kind == "graph"
    assert plan(150, None, head(150), costs=COSTS).kind == "full"


def test_heads_that_need_most_tokens_are_read_as_a_whole() -> None:
    spread_out = head(LONG, answer(0.01, 60_000, 0.004))
    assert planned(spread_out).kind == "full"
    many = head(LONG, answer(0.01, 6_000, 0.004))
    assert planned(many, kinds=("full", "flat", "graph")).kind == "flat"


def test_the_smallest_answer_that_is_good_enough_is_asked() -> None:
    query = planned(head(LONG), kinds=("flat",)).query
    assert query == Dipr(alpha=0.01)
    assert planned(head(LONG), kinds=("flat",), max_error=0.003).query == Dipr(alpha=1e-3)
    assert planned(head(LONG), kinds=("flat",), max_error=0.3).query == Dipr(alpha=0.1)


def test_mass_is_a_target_too_and_stands_in_for_unknown_errors() -> None:
    profile = head(LONG, answer(0.1, 10, None, 0.8), answer(0.01, 50, None, 0.992))
    flat_only: dict[str, Any] = {"kinds": ("flat",)}
    assert planned(profile, min_mass=0.7, **flat_only).query == Dipr(alpha=0.1)
    assert planned(profile, min_mass=0.99, **flat_only).query == Dipr(alpha=0.01)
    assert planned(profile, **flat_only).query == Dipr(alpha=0.01)
    assert not planned(profile, max_error=0.001, **flat_only).meets_target


def test_what_was_measured_counts_more_than_what_is_expected() -> None:
    known = head(LONG).with_searches([search("graph", 800, distances=90_000, hops=9_000)])
    assert planned(known).kind != "graph"
    known = head(LONG).with_searches(
        [search("graph", 60, error=0.02, hops=60), search("graph", 90, hops=90, distances=1500)]
    )
    chosen = planned(known)
    assert (chosen.kind, chosen.query) == ("graph", Dipr(alpha=0.01, width=90))
    assert chosen.chosen.is_measured


def test_what_a_sample_may_have_missed_counts_against_a_search() -> None:
    graph = search("graph", 90, hops=90, distances=1500, error=0.009)
    assert planned(head(LONG).with_searches([graph])).query == graph.query
    unsure = replace(graph, error_p99_upper=0.011)
    wider = replace(search("graph", 120, hops=120, distances=2000), error_p99_upper=0.0095)
    chosen = planned(head(LONG).with_searches([unsure, wider]))
    assert (chosen.query, chosen.chosen.expected_error) == (wider.query, 0.0095)
    unsure_answer = replace(answer(0.01, 50, 0.009), error_p99_upper=0.011)
    known = head(LONG, unsure_answer, answer(1e-3, 200, 1e-3))
    assert planned(known, kinds=("flat",)).query == Dipr(alpha=1e-3)
    assert [each.query for each in known.promising(0.01)] == [Dipr(alpha=1e-3)]


def test_times_that_were_measured_count_more_than_costs() -> None:
    graph = search("graph", 90, hops=90, distances=1500)
    assert planned(head(LONG).with_searches([graph])).kind == "graph"
    slow = head(LONG).with_searches([replace(graph, time_us=5000.0)])
    assert planned(slow, kinds=("flat", "graph")).kind == "flat"
    both = slow.with_searches([search("flat", None, time_us=9000.0)])
    chosen = planned(both, kinds=("flat", "graph"))
    assert (chosen.kind, chosen.chosen.expected_us) == ("graph", pytest.approx(5000))
    fast = head(LONG).with_searches([search("full", None, time_us=10.0)])
    assert planned(fast).kind == "full"
    half = planned(fast, LONG // 2, kinds=("full",)).chosen
    assert half.expected_us == pytest.approx(5, rel=0.1)


def test_reuse_of_a_part_makes_scans_cheaper_but_hardly_graphs() -> None:
    known = head(LONG).with_searches([search("graph", 300, distances=9_000, hops=400)])
    kinds = ("flat", "graph")
    assert planned(known, kinds=kinds).kind == "graph"
    assert planned(known, LONG // 10, kinds=kinds).kind == "flat"


def test_a_coarse_index_takes_more_lists_where_fewer_of_their_keys_count() -> None:
    known = head(LONG).with_searches([search("coarse", 100, distances=11_000)])
    widths = [planned(known, LONG // n, kinds=("coarse",)).query.width for n in (1, 2, 4)]
    assert widths == [100, 200, 400]


def test_memory_decides_between_indexes() -> None:
    graph_bytes, flat_bytes = (index_bytes(kind, LONG, 128) for kind in ("graph", "flat"))
    assert planned(head(LONG), memory_budget=graph_bytes).kind == "graph"
    assert planned(head(LONG), memory_budget=graph_bytes - 1).kind != "graph"
    assert planned(head(LONG), memory_budget=flat_bytes).kind == "flat"
    tight = planned(head(LONG), memory_budget=flat_bytes - 1)
    assert tight.kind == "full" and tight.meets_target


def test_an_objective_that_nothing_meets_is_said_to_be_missed() -> None:
    wanted_ms = planned(head(LONG)).chosen.expected_us / 1e3
    assert planned(head(LONG), slo_ms=wanted_ms * 1.01).meets_slo
    missed = planned(head(LONG), slo_ms=wanted_ms / 2)
    assert not missed.meets_slo and missed.chosen == planned(head(LONG)).chosen
    assert "misses the" in missed.explain() and "misses the" not in planned(head(LONG)).explain()


def test_where_nothing_reaches_the_target_the_nearest_is_taken() -> None:
    hopeless = planned(head(LONG), kinds=("flat",), max_error=1e-5)
    assert not hopeless.meets_target
    assert hopeless.query == Dipr(alpha=1e-3)
    assert "misses the target: error above 0.00%" in hopeless.explain()


def test_an_explanation_names_every_kind_with_its_time_and_why_not() -> None:
    text = planned(head(LONG), memory_budget=index_bytes("coarse", LONG, 128)).explain()
    lines = text.splitlines()
    assert len(lines) == 4
    for kind in ("full", "flat", "coarse", "graph"):
        (line,) = [each for each in lines if f"{kind}, " in each]
        assert " us, " in line
    assert sum(line.startswith("not ") for line in lines) == 3
    assert any("bytes, more than" in line for line in lines if "graph" in line)
    assert any("times as long" in line for line in lines)
    assert "expected only" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"context_len": 0}, "context_len is 0, expected at least 1"),
        ({"prefix_len": LONG + 1}, f"prefix_len is {LONG + 1}, expected 1 to {LONG} or None"),
        ({"head_profile": None}, "head_profile is None, expected what profile_head returns"),
        ({"memory_budget": -1}, "memory_budget is -1, expected bytes"),
        ({"slo_ms": 0}, "slo_ms is 0, expected milliseconds"),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], message: str) -> None:
    call = {"context_len": LONG, "prefix_len": None, "head_profile": head(LONG), **arguments}
    with pytest.raises(ValueError, match=message):
        plan(**call, costs=COSTS)


def test_a_kind_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="kinds: hnsw, expected full, flat, coarse, graph"):
        planned(head(LONG), kinds=("flat", "hnsw"))
    for none in ("flat", ()):
        with pytest.raises(ValueError, match="^kinds is .*, expected a list of full, flat"):
            planned(head(LONG), kinds=none)


@pytest.mark.parametrize("name", ["max_error", "min_mass"])
def test_targets_are_fractions(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 2, expected a number from 0 to 1"):
        planned(head(LONG), **{name: 2})


def test_nothing_is_known_of_a_head_without_answers() -> None:
    with pytest.raises(ValueError, match="knows nothing of flat"):
        planned(replace(head(LONG), answers=()), kinds=("flat",))


_counts = st.floats(1, 50_000)
_heads = st.builds(
    lambda tokens, group, hubs, measured: head(
        LONG,
        *(answer(0.1**i, t, 0.1**i) for i, t in enumerate(sorted(tokens))),
        group_size=group,
        hub_statistic=hubs,
    ).with_searches(measured),
    st.lists(_counts, min_size=1, max_size=4),
    st.sampled_from([1, 4, 8]),
    st.floats(0, 1),
    st.lists(
        st.builds(
            lambda kind, width, **work: search(kind, width, **work),
            st.sampled_from(["coarse", "graph"]),
            st.integers(1, 1000),
            error=st.sampled_from([0.001, 0.02]),
            distances=st.floats(1500, LONG),
            hops=st.floats(1, 5000),
            found=_counts,
        ),
        max_size=4,
    ),
)


@settings(max_examples=cases(38))
@given(_heads, st.lists(st.integers(0, 1 << 26), min_size=2, max_size=2), st.booleans())
def test_more_memory_never_makes_it_slower(
    profile: HeadProfile, budgets: list[int], is_shipped: bool
) -> None:
    costs = SHIPPED if is_shipped else COSTS
    less, more = (
        plan(LONG, None, profile, budget, costs=costs).chosen.expected_us
        for budget in sorted(budgets)
    )
    assert more <= less


@settings(max_examples=cases(38))
@given(_heads, st.lists(st.integers(1, LONG), min_size=2, max_size=2), st.booleans())
def test_a_shorter_prefix_never_makes_it_slower(
    profile: HeadProfile, prefixes: list[int], is_shipped: bool
) -> None:
    """But for graphs, which have to search around the keys behind the prefix."""
    costs = SHIPPED if is_shipped else COSTS
    shorter, longer = (
        plan(
            LONG, prefix_len, profile, kinds=("full", "flat", "coarse"), costs=costs
        ).chosen.expected_us
        for prefix_len in sorted(prefixes)
    )
    assert shorter <= longer * (1 + 1e-9)


@settings(max_examples=cases(13))
@given(_heads, st.lists(st.integers(1, LONG), min_size=2, max_size=2))
def test_a_shorter_prefix_adds_to_a_graph_what_the_filter_costs(
    profile: HeadProfile, prefixes: list[int]
) -> None:
    without_filter = replace(COSTS.kinds["graph"][0], filtered_hop_ns=0)
    with_filter = replace(without_filter, filtered_hop_ns=100)
    times = []
    for cost in (without_filter, with_filter):
        costs = SearchCost((4096,), dict.fromkeys(KINDS, (cost,)))
        times.append(
            [
                plan(LONG, p, profile, kinds=("graph",), costs=costs).chosen.expected_us
                for p in sorted(prefixes)
            ]
        )
    assert times[0][0] <= times[0][1] * (1 + 1e-9)
    assert all(filtered >= plain for plain, filtered in zip(*times, strict=True))

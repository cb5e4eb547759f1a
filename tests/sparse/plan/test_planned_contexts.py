# SPDX-License-Identifier: Apache-2.0
"""A database plans what the heads of a context are asked, stores that and does it."""

from __future__ import annotations

import io
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from tests.sparse.planned_heads import costs_with_cheap
from tests.sparse.tiny_models import logits, random_tokens, stored, tiny_model
from vllm_relay.sparse import DB, Dipr, GraphIndex, QueryType, TopK
from vllm_relay.sparse.contexts.contexts_command import run_show
from vllm_relay.sparse.contexts.disk.context_file import ContextFile
from vllm_relay.sparse.contexts.retrieval import _query_type, query_of_head
from vllm_relay.sparse.index.compiled_index import CompiledIndex
from vllm_relay.sparse.index.elements import Elements, from_float32
from vllm_relay.sparse.plan import index_choice
from vllm_relay.sparse.plan.head_plan import HeadPlan
from vllm_relay.sparse.plan.head_sample import Found, HeadSample
from vllm_relay.sparse.plan.index_choice import build_index
from vllm_relay.sparse.plan.options import DBOptions

CONTEXT = random_tokens(400)
PROMPT = torch.cat([CONTEXT[:, :390], random_tokens(3, seed=1)], 1)
WINDOW = {"sink_tokens": 4, "recent_tokens": 8, "min_context_tokens": 0}


def _db(path: Path | None = None, **options: Any) -> DB:
    return DB(path, {**WINDOW, **options}, model=tiny_model("llama"))


def _decoded(db: DB, prompt: torch.Tensor = PROMPT) -> tuple[torch.Tensor, Any]:
    model = tiny_model("llama")
    session, remaining = db.create_session(prompt)
    logits(model, remaining, session)
    steps = [logits(model, torch.tensor([[token]]), session) for token in (1, 2, 3)]
    return torch.cat(steps), session.stats


def _plans(db: DB) -> list[HeadPlan | None]:
    (context,) = db._store.contexts()
    return [context.plan(layer, head) for layer in range(2) for head in range(2)]


@pytest.mark.parametrize("cheap", ["full", "flat", "graph"])
def test_planned_contexts_answer_like_dense_ones(
    cheap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "vllm_relay.sparse.transformers.db.load_costs", lambda: costs_with_cheap(cheap)
    )
    # an error is kept by what has looked at every key
    db = _db(**({"query": Dipr(alpha=1e-3)} if cheap == "graph" else {"max_error": 1e-3}))
    stored(db, tiny_model("llama"), CONTEXT)
    plans = _plans(db)
    assert None not in plans
    whole = [plan.query_for(400) for plan in plans]
    assert any((query is None) == (cheap == "full") for query in whole)
    outputs, stats = _decoded(db)
    ending = torch.tensor([[1, 2, 3]])
    dense = logits(tiny_model("llama", "sdpa"), torch.cat([PROMPT, ending], 1))[-3:]
    assert torch.linalg.norm(outputs - dense) < 0.05 * torch.linalg.norm(dense)
    assert stats.searches == 3 * 4
    if cheap == "full":
        torch.testing.assert_close(outputs, dense, rtol=0, atol=1e-4)
        assert stats.retrieved_tokens == stats.searched_tokens and stats.distances == 0


@pytest.mark.parametrize("memory_limit_bytes", [None, 1 << 20])
@pytest.mark.parametrize("max_error", [0.0, 0.2])
def test_plans_come_back_with_their_context(
    tmp_path: Path, memory_limit_bytes: int | None, max_error: float
) -> None:
    in_memory, on_disk = _db(max_error=max_error), _db(tmp_path, max_error=max_error)
    for db in (in_memory, on_disk):
        stored(db, tiny_model("llama"), CONTEXT)
    again = _db(tmp_path, max_error=max_error, memory_limit_bytes=memory_limit_bytes)
    assert _plans(again) == _plans(in_memory)
    for prompt in (PROMPT, torch.cat([CONTEXT[:, :120], random_tokens(3, seed=2)], 1)):
        assert torch.equal(_decoded(again, prompt)[0], _decoded(in_memory, prompt)[0])


def test_plans_of_a_file_are_shown(tmp_path: Path) -> None:
    db = _db(tmp_path)
    stored(db, tiny_model("llama"), CONTEXT)
    output = io.StringIO()
    (path,) = tmp_path.glob("*.relayctx")
    assert run_show(path, as_json=True, console=Console(file=output)) == 0
    (report,) = json.loads(output.getvalue())
    places = [f"layers/{layer}/kv_heads/{head}" for layer in range(2) for head in range(2)]
    assert [HeadPlan.from_json(report["plans"][place]) for place in places] == _plans(db)


def test_a_plan_of_another_version_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stored(_db(tmp_path), tiny_model("llama"), CONTEXT)
    monkeypatch.setattr(ContextFile, "plan", lambda *place: {"widths": [1, 2]})
    with caplog.at_level(logging.WARNING):
        db = _db(tmp_path)
        assert _plans(db) == [None] * 4
    assert "plan left out" in caplog.text
    assert _decoded(db)[1].searches == 12


@pytest.mark.parametrize(
    ("options", "with_queries"),
    [({}, False), ({"index": "rules"}, True), ({"index": "flat"}, True)],
)
def test_there_is_no_plan_without_queries_or_by_rules(
    options: dict[str, Any], with_queries: bool
) -> None:
    torch.manual_seed(0)
    layers = [tuple(torch.randn(2, 1, 2, 400, 16)) for _ in range(2)]
    queries = [torch.randn(4, 400, 16) for _ in range(2)] if with_queries else None
    db = _db(**options)
    db.import_(CONTEXT, layers, queries=queries)
    assert _plans(db) == [None] * 4
    (context,) = db._store.contexts()
    expected = "flat" if options.get("index") == "flat" else "graph"
    assert [context.index(layer, 0).kind for layer in range(2)] == ["flat", expected]


PLAN = HeadPlan(((100, None), (1000, Dipr(alpha=0.01, width=70))), "because", max_error=0.01)
FAR = HeadPlan(((1000, Dipr(alpha=0.001, width=80)),), "because", max_error=0.01)
BEST = HeadPlan(((1000, TopK(9, width=80)),), "because", max_error=0.01)
FOR_QUERY = HeadPlan(((1000, TopK(5, width=9)),), "because", max_error=None)


@pytest.mark.parametrize(
    ("options", "prefix_len", "asked"),
    [
        ({}, 1000, Dipr(alpha=0.01, width=70)),
        ({}, 50, None),
        ({"query": Dipr(alpha=0.01)}, 1000, Dipr(alpha=0.01, width=70)),
        ({"query": Dipr(alpha=0.01)}, 50, Dipr(alpha=0.01)),
        ({"query": TopK(5)}, 1000, TopK(5)),
        ({"index": "graph"}, 1000, Dipr(alpha=0.01)),
        ({"index": "rules", "query": TopK(5)}, 1000, TopK(5)),
    ],
)
def test_a_query_that_was_asked_for_is_asked(
    options: dict[str, Any], prefix_len: int, asked: QueryType | None
) -> None:
    assert query_of_head(PLAN, prefix_len, DBOptions(**options)) == asked
    assert query_of_head(None, prefix_len, DBOptions(**options)) is not None


@pytest.mark.parametrize(
    ("plan", "options", "prefix_len", "asked"),
    [
        (PLAN, {"max_error": 0.5}, 1000, Dipr(alpha=0.01, width=70)),
        (PLAN, {"max_error": 0.001}, 1000, Dipr(alpha=0.01, width=70)),
        (PLAN, {"max_error": 0.001}, 100, None),
        (FAR, {"max_error": 0.001}, 1000, Dipr(alpha=0.001, width=80)),
        (BEST, {"max_error": 0.001}, 1000, Dipr(alpha=0.01)),
        (FOR_QUERY, {}, 1000, Dipr(alpha=0.01)),
        (FOR_QUERY, {"max_error": 1.0}, 1000, Dipr(alpha=0.01)),
        (FOR_QUERY, {"query": TopK(5)}, 1000, TopK(5, width=9)),
        (FOR_QUERY, {"query": TopK(6)}, 1000, TopK(6)),
    ],
)
def test_a_plan_that_was_made_for_less_is_not_used(
    plan: HeadPlan, options: dict[str, Any], prefix_len: int, asked: QueryType | None
) -> None:
    assert query_of_head(plan, prefix_len, DBOptions(**options)) == asked


@pytest.mark.parametrize("made_with", [{"query": TopK(5)}, {"max_error": 1.0}])
def test_a_reopened_folder_keeps_to_the_options_it_is_opened_with(
    tmp_path: Path, made_with: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "vllm_relay.sparse.transformers.db.load_costs", lambda: costs_with_cheap("flat")
    )
    stored(_db(tmp_path, **made_with), tiny_model("llama"), CONTEXT)
    _, loose = _decoded(_db(tmp_path, **made_with))
    outputs, stats = _decoded(_db(tmp_path))
    by_rules, wanted = _decoded(_db(tmp_path, query=DBOptions().query))
    assert stats == wanted and torch.equal(outputs, by_rules)
    assert stats.retrieved_tokens > loose.retrieved_tokens


def _head() -> tuple[Elements, Elements, Elements]:
    """Keys and queries in clusters, so that a coarse index finds them."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((30, 16), np.float32)
    keys, queries = (
        2 * centres[rng.integers(0, 30, n)] + 0.3 * rng.standard_normal((n, 16), np.float32)
        for n in (3000, 1200)
    )
    values = rng.standard_normal((3000, 16), np.float32)
    return (
        from_float32(keys, "bfloat16"),
        from_float32(values, "bfloat16"),
        from_float32(queries, "float32"),
    )


@pytest.mark.parametrize("kind", ["coarse", "graph"])
def test_an_index_that_disappoints_is_not_kept(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = DBOptions(query=Dipr(alpha=0.05))
    index, plan = build_index(0, *_head(), 2, options, costs_with_cheap(kind))
    assert index.kind == kind and plan is not None
    query = plan.query_for(3000)
    assert query is not None and query.width is not None

    def search(sample: HeadSample, index: CompiledIndex, query: QueryType) -> Found:
        found = search_sample(sample, index, query)
        return found if index.kind == "flat" else found._replace(mass_p1=0.5)

    search_sample = HeadSample.search
    monkeypatch.setattr(HeadSample, "search", search)
    index, plan = build_index(0, *_head(), 2, options, costs_with_cheap(kind))
    assert index.kind == "flat" and plan is not None
    assert plan.query_for(3000) == Dipr(alpha=0.05) and f"not {kind}" in plan.why


@pytest.mark.parametrize("cheap", ["full", "flat", "coarse", "graph"])
def test_an_error_is_kept_by_what_has_looked_at_every_key(cheap: str) -> None:
    index, plan = build_index(1, *_head(), 2, DBOptions(max_error=0.3), costs_with_cheap(cheap))
    assert index.kind == "flat" and plan is not None and plan.keeps_to(0.3)
    assert [length for length, _ in plan.by_prefix] == [750, 1500, 3000]
    for _, query in plan.by_prefix:
        assert (query is None) == (cheap != "flat")
        assert query is None or query.max_dropped_mass is not None


def _watched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, np.ndarray]]:
    """Of every sample that is made: keys that it sees, and its queries [queries, d]."""
    sampled = []

    def sample(keys: Any, values: Any, queries: np.ndarray, num_keys: int) -> HeadSample:
        sampled.append((num_keys, queries.reshape(-1, queries.shape[2])))
        return HeadSample(keys, values, queries, num_keys)

    monkeypatch.setattr(index_choice, "HeadSample", sample)
    return sampled


def test_no_index_learns_from_the_queries_of_its_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, values, queries = _head()
    learned = []

    def build(index: GraphIndex, keys: Any, train_queries: Elements, **options: Any) -> GraphIndex:
        learned.append(train_queries.to_float32())
        return build_graph(index, keys, train_queries, **options)

    build_graph = GraphIndex.build
    monkeypatch.setattr(GraphIndex, "build", build)
    sampled = _watched(monkeypatch)
    options = DBOptions(query=Dipr(alpha=0.05))
    build_index(1, keys, values, queries, 2, options, costs_with_cheap("graph"))
    assert len(learned) == 1 and len(sampled) == 3
    rows = np.concatenate([*learned, *(each for _, each in sampled)])
    assert np.array_equal(np.unique(rows, axis=0), np.unique(queries.to_float32(), axis=0))
    assert len(rows) == queries.shape[0]


@pytest.mark.parametrize("query", [Dipr(alpha=0.01), Dipr(alpha=0.05), TopK(300)])
@pytest.mark.parametrize("kind", ["coarse", "graph"])
def test_no_plan_is_narrower_than_its_index_searches_by_default(
    kind: str, query: QueryType
) -> None:
    """Narrower ones do for all queries of a sample, but miss keys that only others look for."""
    options = DBOptions(query=query)
    index, plan = build_index(1, *_head(), 2, options, costs_with_cheap(kind))
    assert isinstance(index, CompiledIndex) and index.kind == kind and plan is not None
    for _, planned in plan.by_prefix:
        assert planned is not None and planned.width is not None
        assert planned.width >= index.width_of(replace(planned, width=None))


@pytest.mark.parametrize("query", [Dipr(alpha=0.05), Dipr(beta=20.0), TopK(30)])
@pytest.mark.parametrize("kind", ["flat", "coarse", "graph", "full"])
def test_with_a_query_given_only_index_and_width_are_planned(query: QueryType, kind: str) -> None:
    index, plan = build_index(1, *_head(), 2, DBOptions(query=query), costs_with_cheap(kind))
    assert plan is not None and kind in (index.kind, "full")
    for prefix_len in (3000, 1500, 750):
        planned = plan.query_for(prefix_len)
        assert planned is not None and type(planned) is type(query)
        assert {**vars(planned), "width": None} == vars(query)


@pytest.mark.parametrize("kind", ["flat", "coarse", "graph"])
def test_with_the_last_queries_a_plan_goes_by_these(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, values, queries = _head()
    last = queries.to_float32()[-80:].reshape(40, 2, -1)
    sampled = _watched(monkeypatch)
    options = DBOptions(query=Dipr(alpha=0.05), max_error=0.3)
    index, plan = build_index(
        1, keys, values, queries, 2, options, costs_with_cheap(kind), last_queries=last
    )
    [(num_seen, rows)] = sampled
    assert num_seen == keys.shape[0] - 40 and np.array_equal(rows, last.reshape(80, -1))
    assert plan is not None and [length for length, _ in plan.by_prefix] == [keys.shape[0]]
    assert isinstance(index, CompiledIndex) and index.kind in (kind, "flat")


@pytest.mark.parametrize(("asked_for", "bound"), [(None, 0.005), (0.1, 0.005), (0.001, 0.001)])
def test_of_two_bounds_of_the_dropped_mass_the_smaller_one_holds(
    asked_for: float | None, bound: float
) -> None:
    planned = Dipr(alpha=1.0, max_dropped_mass=0.005)
    asked = _query_type(planned, DBOptions(max_dropped_mass=asked_for), scale=0.25)
    assert asked == Dipr(alpha=1.0, max_dropped_mass=bound, scale=0.25)


def test_a_bound_takes_the_place_of_an_estimate() -> None:
    """A plan may say one and the options the other."""
    planned = Dipr(alpha=0.01, estimate=True)
    asked = _query_type(planned, DBOptions(max_dropped_mass=0.1), scale=0.25)
    assert asked == Dipr(alpha=0.01, max_dropped_mass=0.1, scale=0.25)

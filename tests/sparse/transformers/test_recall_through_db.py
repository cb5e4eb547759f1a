# SPDX-License-Identifier: Apache-2.0
"""The recall model through a database: retrieval finds what dense attention finds, and a window
alone does not."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.sparse.brute_force_index import BruteForceIndex
from tests.sparse.planned_heads import costs_with_cheap
from tests.support.depth import cases
from tests.support.haystacks import Haystack, make_haystack
from vllm_relay.demo.recall_model import build_recall_model
from vllm_relay.sparse import DB, Dipr, QueryType, SearchResult, TopK
from vllm_relay.sparse.contexts.context_store import MemoryContextStore
from vllm_relay.sparse.plan.search_cost import SHIPPED_COSTS, read_costs
from vllm_relay.sparse.transformers import hf

ANSWER_TOKENS = 6

hf.register()


@functools.cache
def _model(directory: Path, attention: str) -> Any:
    build_recall_model(directory, dtype="float32")
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation=attention).eval()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recall")


def _haystacks(num_tokens: int) -> list[Haystack]:
    return [
        make_haystack(num_tokens, num_answer_tokens=ANSWER_TOKENS, seed=seed)
        for seed in range(min(cases(1), 3) if num_tokens <= 4096 else 1)
    ]


def _num_right(answers: list[list[int]], haystacks: list[Haystack]) -> int:
    pairs = zip(answers, (haystack.answer_token_ids for haystack in haystacks), strict=True)
    return sum(a == b for answer, wanted in pairs for a, b in zip(answer, wanted, strict=True))


def _generate(model: Any, haystack: Haystack, cache: Any = None) -> list[int]:
    prompt = torch.tensor([haystack.prompt_token_ids])
    output = model.generate(
        prompt, past_key_values=cache, max_new_tokens=ANSWER_TOKENS, do_sample=False
    )
    return output[0, prompt.shape[1] :].tolist()


@functools.cache
def _dense_answers(directory: Path, num_tokens: int) -> list[list[int]]:
    """All of them right."""
    haystacks = _haystacks(num_tokens)
    answers = [_generate(_model(directory, "sdpa"), haystack) for haystack in haystacks]
    assert _num_right(answers, haystacks) == len(haystacks) * ANSWER_TOKENS
    return answers


@torch.no_grad()
def _sparse_answers(
    directory: Path, haystacks: list[Haystack], query: QueryType | None, **options: Any
) -> tuple[list[list[int]], float]:
    """Answers, and the part of the searched tokens that was retrieved.

    Args:
        query: None leaves it to plans.

    The haystack up to the asked pair is stored; the pair itself is decoded token by token, so that
    no dense prefill sees the answer.
    """
    model = _model(directory, "relay_sparse")
    db = DB(
        options={
            **({} if query is None else {"query": query}),
            "min_context_tokens": 0,
            "index_factory": lambda layer: BruteForceIndex(),
            **options,
        }
    )
    answers, retrieved, searched = [], 0, 0
    for haystack in haystacks:
        prompt = torch.tensor([haystack.prompt_token_ids])
        with db.create_session(prompt[:, :-2])[0] as session:
            model(prompt[:, :-2], past_key_values=session, logits_to_keep=1)
            context_id = db.store(session)
        with db.create_session(prompt)[0] as session:
            assert session.prefix_len == prompt.shape[1] - 2
            model(prompt[:, -2:-1], past_key_values=session)
            answers.append(_generate(model, haystack, session))
            retrieved += session.stats.retrieved_tokens
            searched += session.stats.searched_tokens
        db.delete(context_id)
    return answers, retrieved / searched


class FindsNothing(BruteForceIndex):
    """Leaves the window alone."""

    def search(self, queries: Any, query: QueryType, **kwargs: Any) -> SearchResult:
        found = super().search(queries, query, **kwargs)
        return SearchResult([ids[:0] for ids in found.ids], [s[:0] for s in found.scores], found[2])


@pytest.mark.parametrize(
    "num_tokens",
    [
        4096,
        pytest.param(16384, marks=pytest.mark.soak),
        pytest.param(32760, marks=pytest.mark.soak),
    ],
)
@pytest.mark.parametrize("query", [Dipr(alpha=0.01), TopK(16)], ids=["dipr", "top-k"])
def test_retrieval_is_as_accurate_as_dense_attention(
    directory: Path, num_tokens: int, query: QueryType
) -> None:
    haystacks = _haystacks(num_tokens)
    dense = _dense_answers(directory, num_tokens)
    answers, retrieved = _sparse_answers(directory, haystacks, query)
    assert answers == dense
    # half of the heads of layer 0 are not wired: all their scores are 0, and a range takes them all
    assert retrieved < (0.51 if isinstance(query, Dipr) else 0.01)


@pytest.mark.parametrize(
    ("costs", "query"),
    [
        *((costs, None) for costs in ("shipped", "flat")),
        *((costs, Dipr(alpha=0.01)) for costs in ("shipped", "coarse", "graph")),
        pytest.param("full", None, marks=pytest.mark.soak),
    ],
)
def test_plans_are_as_accurate_as_dense_attention(
    directory: Path, costs: str, query: QueryType | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever kind of index is the fastest, queries that no plan has seen find their key."""
    search_costs = read_costs(SHIPPED_COSTS) if costs == "shipped" else costs_with_cheap(costs)
    monkeypatch.setattr("vllm_relay.sparse.transformers.db.load_costs", lambda: search_costs)
    kinds_built = set()

    def add(store: MemoryContextStore, tokens: Any, layers: Any) -> Any:
        heads = [head for layer in layers for head in layer]
        assert all(head.plan is not None for head in heads)
        kinds_built.update(head.index.kind for head in heads)
        return add_to_store(store, tokens, layers)

    add_to_store = MemoryContextStore.add
    monkeypatch.setattr(MemoryContextStore, "add", add)
    answers, _ = _sparse_answers(
        directory, _haystacks(2048), query, index="auto", index_factory=None
    )
    assert answers == _dense_answers(directory, 2048)
    if costs in ("flat", "coarse", "graph"):
        assert costs in kinds_built


@pytest.mark.parametrize("index", ["rules", "flat", "blocks", "coarse", "graph"])
def test_every_index_finds_the_answer(directory: Path, index: str) -> None:
    haystacks = _haystacks(2048)
    query = TopK(64) if index == "coarse" else Dipr(alpha=0.01)
    answers, _ = _sparse_answers(directory, haystacks, query, index=index, index_factory=None)
    assert _num_right(answers, haystacks) == len(haystacks) * ANSWER_TOKENS


def test_a_window_alone_does_not_find_the_answer(directory: Path) -> None:
    haystacks = _haystacks(4096)
    answers, retrieved = _sparse_answers(
        directory, haystacks, TopK(16), index_factory=lambda layer: FindsNothing()
    )
    assert retrieved == 0
    assert _num_right(answers, haystacks) < len(haystacks) * ANSWER_TOKENS / 3

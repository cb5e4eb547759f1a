# SPDX-License-Identifier: Apache-2.0
"""The database: which context a session gets, and what becomes of a session that is stored."""

from __future__ import annotations

import copy
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import DynamicCache

from tests.sparse.brute_force_index import BruteForceIndex
from tests.sparse.tiny_models import (
    FAMILIES,
    VOCAB_SIZE,
    generate,
    logits,
    random_tokens,
    small_db,
    stored,
    tiny_model,
)
from tests.support.depth import cases
from vllm_relay.sparse import DB, DBOptions, Dipr, TopK
from vllm_relay.sparse.contexts.tokens import common_prefix_len
from vllm_relay.sparse.index.elements import to_tensor
from vllm_relay.sparse.transformers.db import DatabaseFullError


def _states(num_tokens: int, num_layers: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    return [tuple(torch.randn(2, 1, 2, num_tokens, 16)) for _ in range(num_layers)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_chat_goes_on_over_what_was_stored(family: str) -> None:
    model, sdpa = tiny_model(family), tiny_model(family, "sdpa")
    db = small_db()
    sequence = random_tokens(40)
    num_stored = 0
    for turn in range(3):
        with db.create_session(sequence)[0] as session:
            assert session.prefix_len == num_stored
            output = generate(model, sequence, past_key_values=session)
            assert output.tolist() == generate(sdpa, sequence).tolist()
            db.store(session, output)
            num_stored = session.get_seq_length()
            # the last token of an answer is not computed before the next turn
            assert num_stored == output.shape[1] - 1
        sequence = torch.cat([output, random_tokens(5, seed=turn + 1)], 1)
    assert [context.num_tokens for context in db.contexts()] == [47, 60, 73]


def test_a_session_goes_on_after_it_was_stored() -> None:
    model = tiny_model("llama")
    db = small_db()
    session, _ = db.create_session(random_tokens(40))
    output = generate(model, random_tokens(40), past_key_values=session)
    db.store(session, output)
    longer = torch.cat([output, random_tokens(6, seed=1)], 1)
    again = generate(model, longer, past_key_values=session)
    assert again.tolist() == generate(tiny_model("llama", "sdpa"), longer).tolist()
    db.store(session, again)
    assert [context.num_tokens for context in db.contexts()] == [47, 61]


def test_a_stored_session_holds_what_a_prefill_computes() -> None:
    """Keys and values of the reused part are the stored ones, to the last bit."""
    model = tiny_model("llama")
    db = small_db()
    stored(db, model, random_tokens(40))
    stored(db, model, torch.cat([random_tokens(40)[:, :25], random_tokens(20, seed=1)], 1))
    first, second = db._store.contexts()
    cache = DynamicCache()
    logits(tiny_model("llama", "sdpa"), torch.from_numpy(second.tokens)[None], cache)
    for layer in range(2):
        for head in range(2):
            for part in ("keys", "values"):
                i = ("keys", "values").index(part)
                mine = second.rows(layer, head, 0, 45)[i].to_float32()
                reused = first.rows(layer, head, 0, 25)[i].to_float32()
                assert np.array_equal(mine[:25], reused)
                wanted = getattr(cache.layers[layer], part)[0, head].numpy()
                np.testing.assert_allclose(mine, wanted, rtol=0, atol=2e-5)


@settings(max_examples=cases(8))
@given(cut=st.integers(1, 59), extra=st.integers(1, 4), other=st.integers(0, VOCAB_SIZE - 1))
def test_any_prefix_is_reused_to_the_token(cut: int, extra: int, other: int) -> None:
    model = tiny_model("llama")
    context = random_tokens(60)
    db = small_db()
    stored(db, model, context)
    prompt = torch.cat([context[:, :cut], torch.full((1, extra), other)], 1)
    session, remaining = db.create_session(prompt)
    shared = common_prefix_len(context[0].numpy(), prompt[0, :-1].numpy())
    assert session.prefix_len == shared >= cut
    assert remaining.tolist() == prompt[:, shared:].tolist()
    outputs = [logits(model, remaining, session)]
    for token in (3, 5):
        outputs.append(logits(model, torch.tensor([[token]]), session))
    whole = torch.cat([prompt, torch.tensor([[3, 5]])], 1)
    wanted = logits(tiny_model("llama", "sdpa"), whole)[shared:]
    torch.testing.assert_close(torch.cat(outputs), wanted, rtol=0, atol=1e-4)


@settings(max_examples=cases(50))
@given(
    a=st.lists(st.integers(0, 2), max_size=300),
    b=st.lists(st.integers(0, 2), max_size=300),
    shared=st.lists(st.integers(0, 2), max_size=300),
)
def test_common_prefixes(a: list[int], b: list[int], shared: list[int]) -> None:
    a, b = shared + a, shared + b
    wanted = next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
    assert common_prefix_len(np.array(a), np.array(b)) == wanted


def test_the_longest_prefix_wins_and_among_equals_the_shortest_context() -> None:
    db = small_db()
    ids = {n: db.import_([*range(n), 99], _states(n + 1)) for n in (10, 30, 20)}
    short = db.import_([*range(15), 98], _states(16))
    for prompt, context_id, length in [
        ([*range(12), 0], short, 12),
        ([*range(25), 0], ids[30], 25),
        ([*range(14), 0], short, 14),
        ([*range(30), 99], ids[30], 30),
        ([*range(30), 99, 5], ids[30], 31),
        ([7, 8], None, 0),
    ]:
        session, _ = db.create_session(prompt)
        assert (session.context_id, session.prefix_len) == (context_id, length)


@pytest.mark.parametrize(
    ("prompts", "remaining"),
    [
        ([0, 1, 2, 9, 8], [9, 8]),
        ([[0, 1, 2, 9, 8]], [[9, 8]]),
        (torch.tensor([0, 1, 2, 9, 8]), torch.tensor([9, 8])),
        (torch.tensor([[0, 1, 2, 9, 8]]), torch.tensor([[9, 8]])),
        (np.array([0, 1, 2, 9, 8]), np.array([9, 8])),
        ([0, 1, 2, 3], [3]),
        ([0], [0]),
    ],
    ids=str,
)
def test_the_rest_of_a_prompt_comes_in_its_form(prompts: Any, remaining: Any) -> None:
    db = small_db()
    db.import_(range(4), _states(4))
    _, given_back = db.create_session(prompts)
    assert type(given_back) is type(remaining)
    assert np.array_equal(given_back, remaining)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "given no tokens"),
        ([[]], "given no tokens"),
        (torch.zeros(1, 0, dtype=torch.long), "given no tokens"),
        ([[1, 2], [3, 4]], "given 2 sequences, expected one"),
        ([[1, 2], [3]], "given 2 sequences, expected one"),
        (torch.zeros(3, 4, dtype=torch.long), "given 3 sequences, expected one"),
        (torch.zeros(3), "given float32 of shape"),
        ([1, -1], "negative token id -1"),
        ("hello", "call the tokenizer first"),
        (["hello"], "expected the token ids"),
        (None, "expected the token ids"),
        (7, "expected the token ids"),
    ],
)
def test_unusable_prompts(prompts: Any, message: str) -> None:
    for use in (
        small_db().create_session,
        lambda given: small_db().import_(given, _states(4)),
    ):
        with pytest.raises(ValueError, match=f"prompts: .*{message}"):
            use(prompts)


@pytest.mark.parametrize("form", ["dynamic cache", "list"])
def test_an_imported_cache_is_copied_and_served(form: str) -> None:
    model = tiny_model("llama")
    context = random_tokens(50)
    cache = DynamicCache()
    logits(tiny_model("llama", "sdpa"), context, cache)
    db = small_db()
    given = cache if form == "dynamic cache" else [(la.keys, la.values) for la in cache.layers]
    db.import_(context, given)
    for layer in cache.layers:
        layer.keys.zero_()
    prompt = torch.cat([context, random_tokens(4, seed=1)], 1)
    session, _ = db.create_session(prompt)
    assert session.prefix_len == 50
    output = generate(model, prompt, past_key_values=session)
    assert output.tolist() == generate(tiny_model("llama", "sdpa"), prompt).tolist()


@pytest.mark.parametrize(
    ("kv_cache", "message"),
    [
        ([], "holds no layers"),
        (DynamicCache(), "holds no layers"),
        (7, "given int"),
        ([7], "expected a DynamicCache"),
        (_states(4), "keys of 4 tokens for 5 token ids"),
        ([(torch.zeros(2, 2, 5, 16), torch.zeros(2, 2, 5, 16))], r"keys are \[2, 2, 5, 16\]"),
        ([(torch.zeros(2, 5, 16), torch.zeros(2, 5, 16))], r"expected \[1, kv_heads"),
        ([(torch.zeros(1, 2, 5, 16), torch.zeros(1, 1, 5, 16))], "expected the same"),
        ([(torch.zeros(1, 2, 5, 16), torch.zeros(1, 2, 5, 16).half())], "expected the same"),
        ([(torch.zeros(1, 2, 5, 16).double(),) * 2], "torch.float64, expected float32"),
        ([(torch.full((1, 2, 5, 16), torch.nan), torch.zeros(1, 2, 5, 16))], "kv head 0: keys"),
        ([(torch.zeros(1, 2, 5, 16), torch.full((1, 2, 5, 16), torch.inf))], "kv head 0: values"),
        ([*_states(5), (torch.zeros(1, 1, 5, 16),) * 2], "layer 1 has"),
        ([(torch.zeros(1, 0, 5, 16),) * 2], r"keys are \[1, 0, 5, 16\], expected at least one kv"),
        ([(torch.zeros(1, 2, 5, 16), torch.zeros(1, 2, 5, 0))], r"values are \[1, 2, 5, 0\]"),
    ],
)
def test_unusable_caches(kv_cache: Any, message: str) -> None:
    db = small_db()
    with pytest.raises(ValueError, match=message):
        db.import_(range(5), kv_cache)
    assert db.contexts() == []


def test_a_sliding_window_cache_that_forgot_is_refused() -> None:
    model = tiny_model("mistral", "sdpa", sliding=True)
    cache = DynamicCache(config=model.config)
    logits(model, random_tokens(50), cache)
    with pytest.raises(ValueError, match="sliding-window layers drop the oldest"):
        small_db().import_(random_tokens(50), cache)


def test_imported_training_queries_come_from_every_head() -> None:
    queries = torch.arange(4 * 30).float().view(4, 30, 1).expand(4, 30, 16)
    db = small_db(train_queries_per_key=0.5)
    db.import_(range(30), _states(30), queries=[queries])
    for head in range(2):
        index = db._store.contexts()[0].index(0, head)
        assert isinstance(index, BruteForceIndex) and index.train_queries is not None
        rows = index.train_queries.data[:, 0].astype(int)
        assert len(rows) == 15
        assert set(rows // 30) == {2 * head, 2 * head + 1}
        assert list(rows % 30) == sorted(rows % 30)
        assert (rows % 30).max() >= 27


@pytest.mark.parametrize(
    ("queries", "message"),
    [
        ([], "of 0 layers, expected 1"),
        ([torch.zeros(3, 5, 16)], "multiple of 2 heads"),
        ([torch.zeros(4, 5, 8)], r"expected \[heads, tokens, 16\]"),
        ([torch.zeros(1, 4, 5, 16)], r"expected \[heads, tokens, 16\]"),
        ([None], "NoneType"),
        (5, "given int, expected a tensor for each layer"),
        ([torch.zeros(4, 5, 16, dtype=torch.int64)], "torch.int64, expected floating"),
        ([torch.zeros(4, 5, 16, dtype=torch.complex64)], "torch.complex64, expected floating"),
        ([torch.full((4, 5, 16), torch.nan)], r"kv head 0: NaN or infinity at \[0, 0\]"),
    ],
)
def test_unusable_training_queries(queries: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"queries.*{message}"):
        small_db().import_(range(5), _states(5), queries=queries)


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("given", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("on_disk", [False, True])
def test_training_queries_are_kept_in_the_dtype_of_the_keys(
    tmp_path: Path, kept: torch.dtype, given: torch.dtype, on_disk: bool
) -> None:
    model = copy.deepcopy(tiny_model("llama")).to(kept)
    options = small_db(train_queries_per_key=0.5).options
    db = DB(tmp_path if on_disk else None, options, model=model)
    states = [(keys.to(kept), values.to(kept)) for keys, values in _states(40, 2)]
    queries = torch.randn(4, 40, 16).to(given)
    context = random_tokens(40)
    db.import_(context, states, queries=[queries, queries])
    stored(db, model, torch.cat([context[:, :30], random_tokens(10, seed=1)], 1))
    first, second = (context.train_queries(1, 1) for context in db._store.contexts())
    assert first is not None and second is not None
    wanted = queries[[2 + i % 2 for i in range(20)], torch.arange(20) * 2 + 1].to(kept)
    assert torch.equal(to_tensor(first), wanted)
    assert second.shape == (20, 16) and second.dtype == first.dtype
    assert torch.equal(to_tensor(second)[:15], wanted[:15])


def test_states_of_another_dtype_are_not_stored() -> None:
    db = small_db()
    session, _ = db.create_session(range(5))
    session.update(*torch.zeros(2, 1, 2, 5, 16, dtype=torch.float64), 0)
    with pytest.raises(ValueError, match="layer 0: keys: torch.float64, expected float32"):
        db.store(session)


def test_training_queries_of_a_reused_context_are_kept() -> None:
    model = tiny_model("llama")
    db = small_db(train_queries_per_key=0.5)
    stored(db, model, random_tokens(40))
    stored(db, model, torch.cat([random_tokens(40)[:, :30], random_tokens(10, seed=1)], 1))
    first, second = (context.train_queries(1, 1) for context in db._store.contexts())
    assert first is not None and second is not None
    assert first.shape == second.shape == (20, 16)
    assert np.array_equal(first.data[:15], second.data[:15])
    assert not np.array_equal(first.data[15:], second.data[15:])


def test_the_same_tokens_are_stored_once() -> None:
    db = small_db()
    first = db.import_(range(10), _states(10))
    assert db.import_(range(10), _states(10)) == first
    assert len(db.contexts()) == 1


def test_what_store_refuses() -> None:
    model = tiny_model("llama")
    db = small_db()
    prompt = random_tokens(20)
    session, _ = db.create_session(prompt)
    with pytest.raises(ValueError, match="holds no tokens yet"):
        db.store(session)
    output = generate(model, prompt, past_key_values=session)
    with pytest.raises(ValueError, match="holds 27 tokens, the prompt has 20"):
        db.store(session)
    with pytest.raises(ValueError, match="26 ids for a session of 27 tokens"):
        db.store(session, output[:, :26])
    wrong = output.clone()
    wrong[0, 3] = (wrong[0, 3] + 1) % VOCAB_SIZE
    with pytest.raises(ValueError, match=f"id {wrong[0, 3]} at position 3"):
        db.store(session, wrong)
    with pytest.raises(ValueError, match="another database"):
        small_db().store(session, output)
    session.layers[1].crop(-1)
    with pytest.raises(ValueError, match="between forward passes"):
        db.store(session, output)
    assert db.contexts() == []


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("how", ["nothing computed", "cropped", "cropped after a step"])
def test_a_session_of_reused_tokens_only_is_stored(tmp_path: Path, how: str, on_disk: bool) -> None:
    model = tiny_model("llama")
    options = {"min_context_tokens": 0, "sink_tokens": 4, "recent_tokens": 8, "max_error": 0.0}
    db = DB(tmp_path if on_disk else None, options, model=model)
    context = random_tokens(300)
    whole_id = stored(db, model, context)
    prompt = torch.cat([context[:, :200], random_tokens(3, seed=1)], 1)
    session, remaining = db.create_session(prompt)
    if how == "cropped after a step":
        logits(model, remaining, session)
    if how != "nothing computed":
        session.crop(190)
    num_tokens = session.get_seq_length()
    assert num_tokens == (200 if how == "nothing computed" else 190)
    context_id = db.store(session)
    whole, part = db._store.contexts()
    assert (whole.id, part.id) == (whole_id, context_id) and part.num_tokens == num_tokens
    for ours, theirs in zip(part.rows(1, 1, 0, 190), whole.rows(1, 1, 0, 190), strict=True):
        assert np.array_equal(ours.data, theirs.data)
    queries = part.train_queries(1, 1)
    assert queries is not None and queries.shape[0] == int(120 * num_tokens / 300)
    plan = part.plan(1, 1)
    assert plan is not None and plan.by_prefix[-1][0] == num_tokens
    assert db.create_session(context[:, :180])[0].context_id == context_id
    assert session.layers[0].group_size == 2
    session, _ = db.create_session(torch.cat([context, prompt], 1))
    assert db.store(session) == whole_id


def test_a_deleted_context_serves_its_sessions_to_the_end() -> None:
    model = tiny_model("llama")
    db = small_db()
    context_id = stored(db, model, random_tokens(50))
    prompt = torch.cat([random_tokens(50), random_tokens(4, seed=1)], 1)
    sessions = [db.create_session(prompt)[0] for _ in range(2)]
    used_bytes = db.used_bytes
    assert used_bytes == db.contexts()[0].num_bytes > 2 * 2 * 2 * 50 * 16 * 4
    db.delete(context_id)
    assert db.contexts() == []
    assert db.create_session(prompt)[0].prefix_len == 0
    wanted = generate(tiny_model("llama", "sdpa"), prompt).tolist()
    for session in sessions:
        assert db.used_bytes == used_bytes
        assert generate(model, prompt, past_key_values=session).tolist() == wanted
        session.close()
    gc.collect()
    assert db.used_bytes == 0
    with pytest.raises(KeyError, match=f"no context '{context_id}'; stored: none"):
        db.delete(context_id)


def test_the_memory_limit() -> None:
    size = 2 * 2 * 10 * 16 * 4 + 10 * 8  # keys and values, token ids
    db = small_db(memory_limit_bytes=2 * size)
    ids = [db.import_(range(i, i + 10), _states(10)) for i in range(2)]
    assert db.used_bytes == 2 * size
    with pytest.raises(DatabaseFullError, match=r"delete\(\) contexts or raise the limit"):
        db.import_(range(2, 12), _states(10))
    session, _ = db.create_session(range(1, 15))
    db.delete(ids[1])
    with pytest.raises(DatabaseFullError):
        db.import_(range(2, 12), _states(10))
    session.close()
    gc.collect()
    db.import_(range(2, 12), _states(10))


@pytest.mark.parametrize("place", ["memory", "disk", "pool"])
def test_sessions_in_many_threads(tmp_path: Path, place: str) -> None:
    model = tiny_model("llama")
    options = small_db(memory_limit_bytes=1 << 20 if place == "pool" else None).options
    db = DB(None if place == "memory" else tmp_path, options, model=model)
    contexts = [random_tokens(50, seed=seed) for seed in range(2)]
    for context in contexts:
        stored(db, model, context)
    prompts = [
        torch.cat([contexts[i % 2][:, : 30 + i], random_tokens(3 + i % 3, seed=10 + i)], 1)
        for i in range(12)
    ]
    wanted = [generate(tiny_model("llama", "sdpa"), prompt).tolist() for prompt in prompts]
    start = threading.Barrier(4)

    def run(i: int) -> tuple[list[list[int]], int]:
        if i < 4:
            start.wait()
        with db.create_session(prompts[i])[0] as session:
            output = generate(model, prompts[i], past_key_values=session)
            db.store(session, output)
            return output.tolist(), session.stats.searches

    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(run, range(len(prompts))))
    assert [tokens for tokens, _ in done] == wanted
    assert all(searches == 28 for _, searches in done)
    assert len(db.contexts()) == 2 + 12


def test_two_databases_and_models_side_by_side() -> None:
    sides = []
    for family in ("llama", "qwen3"):
        db = small_db()
        stored(db, tiny_model(family), random_tokens(40))
        session, remaining = db.create_session(random_tokens(50))
        sides.append((family, session, logits(tiny_model(family), remaining, session)))
    for family, session, _ in sides:
        step = logits(tiny_model(family), torch.tensor([[1]]), session)
        whole = torch.cat([random_tokens(50), torch.tensor([[1]])], 1)
        wanted = logits(tiny_model(family, "sdpa"), whole)[-1:]
        torch.testing.assert_close(step, wanted, rtol=0, atol=1e-4)


def test_a_closed_database_says_so() -> None:
    with small_db() as db:
        db.import_(range(20), _states(20))
        session, _ = db.create_session(range(21))
    db.close()
    for use in (
        lambda: db.create_session([1]),
        lambda: db.import_(range(5), _states(5)),
        lambda: db.store(session),
        lambda: db.contexts(),
        lambda: db.delete("x"),
        lambda: db.__enter__(),
    ):
        with pytest.raises(RuntimeError, match="database is closed"):
            use()
    states = torch.zeros(1, 2, 1, 16)
    session.update(states, states, 0)
    assert session.attention(torch.zeros(1, 4, 1, 16), 0).shape == (1, 4, 1, 16)


def test_a_given_model_is_the_only_one() -> None:
    db = DB(model=tiny_model("llama"), options=small_db().options)
    session, remaining = db.create_session(random_tokens(5))
    with pytest.raises(ValueError, match="contexts of another model"):
        logits(tiny_model("mistral"), remaining, session)


@pytest.mark.parametrize("model", ["llama", 5, torch.nn.Linear(2, 2), torch.nn.Linear])
@pytest.mark.parametrize("on_disk", [False, True])
def test_unusable_models(tmp_path: Path, model: Any, on_disk: bool) -> None:
    with pytest.raises(ValueError, match="model: given .*, expected a transformers model or its"):
        DB(tmp_path / "contexts" if on_disk else None, model=model)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("made", [None, BruteForceIndex, "flat"])
def test_unusable_index_factories(made: Any) -> None:
    db = small_db(index_factory=lambda layer: made)
    with pytest.raises(ValueError, match="index_factory: returned .* for layer 0, expected an un"):
        db.import_(range(5), _states(5))
    assert db.contexts() == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sink_tokens": -1}, "greater than or equal to 0"),
        ({"sink_tokens": 1.5}, "valid integer"),
        ({"recent_tokens": True}, "valid integer"),
        ({"index": "hnsw"}, "'auto', 'rules', 'flat', 'blocks', 'coarse' or 'graph'"),
        ({"max_dropped_mass": 1.5}, "less than or equal to 1"),
        ({"max_dropped_mass": True}, "expected a number"),
        ({"train_queries_per_key": 2}, "less than or equal to 1"),
        ({"memory_limit_bytes": 0}, "greater than or equal to 1"),
        ({"threads": 0}, "greater than or equal to 1"),
        ({"query": "top-k"}, "query"),
        ({"window": 3}, "Extra inputs are not permitted"),
    ],
)
def test_unusable_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DB(options=options)


def test_default_options() -> None:
    options = DBOptions()
    assert isinstance(options.query, Dipr)
    assert DBOptions(query={"k": 3}).query == TopK(3)
    assert DBOptions(query={"alpha": 0.5}).query == Dipr(alpha=0.5)

# SPDX-License-Identifier: Apache-2.0
"""Sessions: attention against the float64 oracle, and what a cache has to do besides."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from tests.sparse.brute_force_index import BruteForceIndex
from tests.sparse.tiny_models import (
    EVERYTHING,
    generate,
    logits,
    random_tokens,
    small_db,
    stored,
    tiny_model,
)
from tests.support import reference
from tests.support.depth import cases
from vllm_relay.sparse import Dipr, QueryType, Session, TopK

KV_HEADS, GROUP, HEAD_SIZE = 2, 2, 16
SINKS, RECENT = 4, 8
SCALE = HEAD_SIZE**-0.5


def _random_states(num_tokens: int, seed: int, size: int = HEAD_SIZE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, KV_HEADS, num_tokens, size, generator=generator)


def _session(
    num_stored: int, prefix_len: int, *, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[Session, torch.Tensor, torch.Tensor]:
    """A session over random keys and values of one layer, and these."""
    keys, values = (_random_states(num_stored, seed).to(dtype) for seed in (1, 2))
    db = small_db(**options)
    db.import_(range(num_stored), [(keys, values)])
    session, _ = db.create_session([*range(prefix_len), 10**6])
    assert session.prefix_len == prefix_len
    return session, keys[:, :, :prefix_len], values[:, :, :prefix_len]


def _decode(
    session: Session, keys: torch.Tensor, values: torch.Tensor, num_new: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(output, query, keys, values) of the last of `num_new` tokens, added one by one."""
    for i in range(num_new):
        key, value = (_random_states(1, 10 * i + seed).to(keys.dtype) for seed in (3, 4))
        session.update(key, value, 0)
        keys, values = torch.cat([keys, key], 2), torch.cat([values, value], 2)
    generator = torch.Generator().manual_seed(5)
    query = torch.randn(1, KV_HEADS * GROUP, 1, HEAD_SIZE, generator=generator).to(keys.dtype)
    return session.attention(3 * query, 0), 3 * query, keys, values


def _oracle(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    prefix_len: int,
    query_type: QueryType,
) -> np.ndarray:
    """[heads, value_size] in float64: the window, and what the query asks for between."""
    num_tokens = keys.shape[2]
    middle = np.arange(SINKS, prefix_len - RECENT)
    window = np.setdiff1d(np.arange(num_tokens), middle)
    outputs = []
    for head in range(KV_HEADS):
        k, v = keys[0, head].double().numpy(), values[0, head].double().numpy()
        for q in query[0, head * GROUP : (head + 1) * GROUP, 0].double().numpy():
            scores = k @ q
            if isinstance(query_type, TopK):
                found = middle[np.argsort(-scores[middle])[: query_type.k]]
            else:
                found = middle[scores[middle] >= scores.max() - query_type.range(HEAD_SIZE)]
            seen = np.concatenate([window, found])
            outputs.append(reference.attend(q[None], k, v, [seen])[0][0])
    return np.array(outputs)


@pytest.mark.parametrize("num_new", [1, 3, 100])
@pytest.mark.parametrize(
    "query_type",
    [EVERYTHING, Dipr(alpha=0.1), Dipr(beta=0.0), Dipr(alpha=0.5), TopK(1), TopK(7), TopK(10**6)],
    ids=str,
)
def test_decode_reads_the_window_and_what_the_query_asks_for(
    query_type: QueryType, num_new: int
) -> None:
    session, keys, values = _session(70, 70, query=query_type)
    output, query, keys, values = _decode(session, keys, values, num_new)
    wanted = _oracle(query, keys, values, 70, query_type)
    np.testing.assert_allclose(output[0, :, 0].numpy(), wanted, rtol=0, atol=2e-6)
    assert session.stats.searches == KV_HEADS


@pytest.mark.parametrize(("sinks", "recent"), [(0, 0), (0, 5), (5, 0), (60, 9), (69, 0), (40, 40)])
def test_windows_of_any_size_neither_miss_nor_count_twice(sinks: int, recent: int) -> None:
    session, keys, values = _session(70, 70, sink_tokens=sinks, recent_tokens=recent)
    output, query, keys, values = _decode(session, keys, values)
    wanted = _causal(query, keys, values)
    torch.testing.assert_close(output.double(), wanted, rtol=0, atol=2e-6)
    assert session.stats.searched_tokens == KV_HEADS * max(70 - sinks - recent, 0)


@settings(max_examples=cases(15))
@given(
    num_stored=st.integers(1, 60),
    cut=st.integers(1, 60),
    min_context_tokens=st.integers(0, 40),
    alpha=st.sampled_from([1e-30, 0.05, 1.0]),
)
def test_any_prefix_of_a_context(
    num_stored: int, cut: int, min_context_tokens: int, alpha: float
) -> None:
    prefix_len = min(num_stored, cut)
    query_type = Dipr(alpha=alpha)
    session, keys, values = _session(
        num_stored, prefix_len, query=query_type, min_context_tokens=min_context_tokens
    )
    output, query, keys, values = _decode(session, keys, values)
    retrieves = prefix_len >= min_context_tokens and prefix_len > SINKS + RECENT
    wanted = _oracle(query, keys, values, prefix_len, query_type if retrieves else EVERYTHING)
    np.testing.assert_allclose(output[0, :, 0].numpy(), wanted, rtol=0, atol=2e-6)
    assert bool(session.stats.searches) == retrieves


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_queries", [1, 5])
def test_half_precision(dtype: torch.dtype, num_queries: int) -> None:
    session, keys, values = _session(70, 70, dtype=dtype)
    key, value = (_random_states(num_queries, seed).to(dtype) for seed in (3, 4))
    session.update(key, value, 0)
    query = torch.randn(1, KV_HEADS * GROUP, num_queries, HEAD_SIZE).to(dtype)
    output = session.attention(query, 0)
    assert output.dtype == dtype
    keys, values = torch.cat([keys, key], 2), torch.cat([values, value], 2)
    tolerance = torch.finfo(dtype).eps * 8
    torch.testing.assert_close(
        output.double(), _causal(query, keys, values), rtol=0, atol=tolerance
    )


@settings(max_examples=cases(15))
@given(
    prefix_len=st.integers(1, 50),
    chunks=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    sliding_window=st.one_of(st.none(), st.integers(1, 60)),
)
def test_prompts_behind_a_context_are_exact_and_causal(
    prefix_len: int, chunks: list[int], sliding_window: int | None
) -> None:
    session, keys, values = _session(50, prefix_len)
    for i, size in enumerate(chunks):
        key, value = (_random_states(size, 10 * i + seed) for seed in (3, 4))
        session.update(key, value, 0)
        keys, values = torch.cat([keys, key], 2), torch.cat([values, value], 2)
        query = torch.randn(1, KV_HEADS * GROUP, size, HEAD_SIZE)
        output = session.attention(query, 0, scale=0.3, sliding_window=sliding_window)
        wanted = _causal(query, keys, values, 0.3, sliding_window)
        torch.testing.assert_close(output.double(), wanted, rtol=0, atol=2e-6)


def test_prompts_do_not_search() -> None:
    session, _, _ = _session(70, 70, query=TopK(1))
    states = _random_states(2, 3)
    session.update(states, states, 0)
    session.attention(torch.randn(1, KV_HEADS * GROUP, 2, HEAD_SIZE), 0)
    assert session.stats.searches == 0


def _causal(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float = SCALE,
    sliding_window: int | None = None,
) -> torch.Tensor:
    num_queries, num_tokens = query.shape[2], keys.shape[2]
    keys, values = (part.double().repeat_interleave(GROUP, 1) for part in (keys, values))
    distance = torch.arange(num_tokens - num_queries, num_tokens)[:, None] - torch.arange(
        num_tokens
    )
    hidden = (distance < 0) | (distance >= (sliding_window or num_tokens))
    scores = (query.double() @ keys.transpose(2, 3) * scale).masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ values


@pytest.mark.parametrize("query_type", [TopK(1), Dipr(alpha=0.9)], ids=str)
def test_a_bound_on_the_dropped_mass_reads_flat_heads_as_a_whole(query_type: QueryType) -> None:
    loose, keys, values = _session(70, 70, query=query_type, max_dropped_mass=1.0)
    tight, _, _ = _session(70, 70, query=query_type, max_dropped_mass=0.0)
    _decode(loose, keys, values)
    output, query, keys, values = _decode(tight, keys, values)
    wanted = _oracle(query, keys, values, 70, EVERYTHING)
    np.testing.assert_allclose(output[0, :, 0].numpy(), wanted, rtol=0, atol=2e-6)
    assert tight.stats.dropped_mass < 1e-6 < loose.stats.dropped_mass <= 1
    assert tight.stats.retrieved_tokens == KV_HEADS * (70 - SINKS - RECENT)


def test_without_a_bound_no_dropped_mass_is_told() -> None:
    session, keys, values = _session(300, 300, query=Dipr(alpha=0.5))
    _decode(session, keys, values, 2)
    assert session.stats.searches > 0
    assert session.stats.dropped_mass is None


def test_a_query_may_bound_the_dropped_mass_itself() -> None:
    session, keys, values = _session(70, 70, query=TopK(1, max_dropped_mass=0.0))
    _decode(session, keys, values)
    assert session.stats.dropped_mass < 1e-6
    assert session.stats.retrieved_tokens == KV_HEADS * (70 - SINKS - RECENT)


@settings(max_examples=cases(15))
@given(
    seed=st.integers(0, 1000),
    tau=st.floats(0.0, 1.0),
    query_type=st.sampled_from([TopK(1), TopK(5), Dipr(alpha=0.5), Dipr(alpha=0.05)]),
)
def test_the_dropped_mass_stays_below_its_bound(
    seed: int, tau: float, query_type: QueryType
) -> None:
    # with the values of all dropped tokens 1 and all others 0, the dropped mass is what is missing
    keys = _random_states(70, 1)
    values = torch.ones_like(keys)
    values[:, :, :SINKS] = values[:, :, 70 - RECENT :] = 0
    db = small_db(query=query_type, max_dropped_mass=tau)
    db.import_(range(70), [(keys, values)])
    session, _ = db.create_session([*range(70), 10**6])
    key = _random_states(1, seed)
    session.update(key, torch.zeros_like(key), 0)
    query = 2 * _random_states(GROUP, seed + 1).transpose(1, 2).reshape(1, -1, 1, HEAD_SIZE)
    output = session.attention(query, 0)
    keys, values = torch.cat([keys, key], 2), torch.cat([values, torch.zeros_like(key)], 2)
    dense = _oracle(query, keys, values, 70, EVERYTHING)
    # mass m of the dropped tokens: dense = read * (1 - m) + m
    read = output[0, :, 0].double().numpy()
    assert (dense - read <= tau * (1 - read) + 1e-5).all()


def test_the_range_follows_the_scale_of_the_scores() -> None:
    """alpha is about attention weights: the same keys count as with a query scaled by hand."""
    stats = []
    for scale in (0.05, 2.0):
        session, keys, values = _session(70, 70, query=Dipr(alpha=0.2))
        key, value = _random_states(1, 3), _random_states(1, 4)
        session.update(key, value, 0)
        query = torch.randn(1, KV_HEADS * GROUP, 1, HEAD_SIZE, generator=torch.Generator())
        output = session.attention(query, 0, scale=scale)
        by_hand, _, _ = _session(70, 70, query=Dipr(alpha=0.2))
        by_hand.update(key, value, 0)
        wanted = by_hand.attention(query * scale / SCALE, 0)
        torch.testing.assert_close(output, wanted, rtol=0, atol=2e-6)
        assert session.stats == by_hand.stats
        stats.append(session.stats.retrieved_tokens)
    assert stats[0] > stats[1]


@pytest.mark.parametrize("removed", [1, 5, 20, 60, 75])
def test_a_cropped_session_goes_on_as_if_never_longer(removed: int) -> None:
    model = tiny_model("llama")
    db = small_db()
    context = random_tokens(60)
    stored(db, model, context)
    prompt = torch.cat([context, random_tokens(15, seed=1)], 1)
    session, remaining = db.create_session(prompt)
    logits(model, remaining, session)
    session.crop(-removed)
    assert session.get_seq_length() == 75 - removed
    again = random_tokens(6, seed=2)
    output = logits(model, again, session)
    step = logits(model, again[:, :1], session)
    whole = torch.cat([prompt[:, : 75 - removed], again, again[:, :1]], 1)
    wanted = logits(tiny_model("llama", "sdpa"), whole)[-7:]
    torch.testing.assert_close(torch.cat([output, step]), wanted, rtol=0, atol=1e-4)


def test_reset_empties_a_session() -> None:
    model = tiny_model("llama")
    db = small_db()
    stored(db, model, random_tokens(60))
    session, remaining = db.create_session(random_tokens(61))
    logits(model, remaining, session)
    session.reset()
    assert session.get_seq_length() == 0
    other = random_tokens(9, seed=3)
    wanted = logits(tiny_model("llama", "sdpa"), other)
    torch.testing.assert_close(logits(model, other, session), wanted, rtol=0, atol=1e-4)


def test_a_deep_copy_goes_on_by_itself() -> None:
    model = tiny_model("llama")
    db = small_db()
    stored(db, model, random_tokens(60))
    session, remaining = db.create_session(random_tokens(70))
    logits(model, remaining, session)
    twin = copy.deepcopy(session)
    outputs = [
        logits(model, torch.tensor([[token, token + 1]]), cache)
        for cache, token in ((session, 5), (twin, 9))
    ]
    for output, token in zip(outputs, (5, 9), strict=True):
        whole = torch.cat([random_tokens(70), torch.tensor([[token, token + 1]])], 1)
        wanted = logits(tiny_model("llama", "sdpa"), whole)[-2:]
        torch.testing.assert_close(output, wanted, rtol=0, atol=1e-4)
    assert session.stats is not twin.stats
    session.close()
    assert twin.get_seq_length() == 72


def test_a_session_tells_what_a_dynamic_cache_tells() -> None:
    model = tiny_model("llama")
    session, _ = small_db().create_session(random_tokens(20))
    cache = DynamicCache()
    for new in (random_tokens(20), random_tokens(1, seed=1)):
        for each in (session, cache):
            logits(model, new, each)
        assert session.get_seq_length() == cache.get_seq_length()
        assert session.get_mask_sizes(3, 1) == cache.get_mask_sizes(3, 1)
        assert session.is_sliding == cache.is_sliding
        assert session.get_max_length() == cache.get_max_length()
        assert session.is_compileable == cache.is_compileable
        assert len(session) == len(cache)
        for mine, theirs in zip(session.layers, cache.layers, strict=True):
            torch.testing.assert_close(mine.keys, theirs.keys)
            torch.testing.assert_close(mine.values, theirs.values)


def test_updated_states_are_the_whole_cache() -> None:
    session, keys, values = _session(30, 20)
    key, value = _random_states(2, 3), _random_states(2, 4)
    all_keys, all_values = session.update(key, value, 0)
    assert all_keys.shape == all_values.shape == (1, KV_HEADS, 22, HEAD_SIZE)
    assert torch.equal(all_keys + 0, torch.cat([keys, key], 2))
    assert torch.equal(all_values + 0, torch.cat([values, value], 2))
    session.crop(-1)
    with pytest.raises(RuntimeError, match="holds 21 by now"):
        all_keys + 0


def test_closing_frees_tokens_and_context() -> None:
    model = tiny_model("llama")
    db = small_db()
    context_id = stored(db, model, random_tokens(60))
    session, remaining = db.create_session(random_tokens(70))
    logits(model, remaining, session)
    held = [weakref.ref(session.layers[0]._local._keys), weakref.ref(session._context)]
    new = _random_states(1, 0)
    all_keys, _ = session.update(new, new, 0)
    db.delete(context_id)
    gc.disable()
    try:
        session.close()
        assert [ref() for ref in held] == [None, None]
    finally:
        gc.enable()
    assert db.used_bytes == 0
    with pytest.raises(RuntimeError, match="read them before it is cropped or closed"):
        all_keys + 0


def test_a_dropped_session_is_freed_without_the_garbage_collector() -> None:
    model = tiny_model("llama")
    session, _ = small_db().create_session(random_tokens(60))
    generate(model, random_tokens(60), 2, past_key_values=session)
    held = [weakref.ref(session), weakref.ref(session.layers[0]._local._keys)]
    gc.collect()
    gc.disable()
    try:
        del session
        assert [ref() for ref in held] == [None, None]
    finally:
        gc.enable()


def test_a_session_whose_forward_pass_failed_says_so() -> None:
    model = tiny_model("llama")
    session, _ = small_db().create_session(random_tokens(20))
    logits(model, random_tokens(20), session)
    states = _random_states(1, 0)
    session.update(states, states, 0)
    with pytest.raises(RuntimeError, match="hold 20 to 21 tokens: a forward pass .* has failed"):
        logits(model, random_tokens(1), session)


def test_a_closed_session_says_so() -> None:
    db = small_db()
    with db.create_session([1, 2, 3])[0] as session:
        assert not session.is_closed
    assert session.is_closed
    session.close()
    states = _random_states(1, 0)
    for use in (
        lambda: session.update(states, states, 0),
        lambda: session.attention(states, 0),
        lambda: session.get_seq_length(),
        lambda: logits(tiny_model("llama"), torch.tensor([[1]]), session),
        lambda: copy.deepcopy(session),
        lambda: db.store(session),
        lambda: session.__enter__(),
    ):
        with pytest.raises(RuntimeError, match=r"session is closed: .*create_session"):
            use()


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, KV_HEADS, 1, HEAD_SIZE), "a batch of 2"),
        ((1, KV_HEADS + 1, 1, HEAD_SIZE), "expected 2 kv heads, head size 16"),
        ((1, KV_HEADS, 1, HEAD_SIZE + 1), "expected 2 kv heads, head size 16"),
        ((KV_HEADS, 1, HEAD_SIZE), "expected \\[1, kv_heads, tokens, size\\]"),
    ],
)
def test_unusable_states(shape: tuple[int, ...], message: str) -> None:
    session, _, _ = _session(30, 20)
    with pytest.raises(ValueError, match=message):
        session.update(torch.zeros(shape), torch.zeros(shape), 0)


def test_states_of_another_dtype_or_layer() -> None:
    session, _, _ = _session(30, 20)
    states = _random_states(1, 0)
    with pytest.raises(ValueError, match="torch.float32 as before"):
        session.update(states.half(), states.half(), 0)
    with pytest.raises(ValueError, match="the reused context has 1 layers"):
        session.update(states, states, 1)


@pytest.mark.parametrize(
    "shape", [(1, 4, 2, HEAD_SIZE), (1, 3, 1, HEAD_SIZE), (4, 1, HEAD_SIZE), (1, 4, 1, 8)]
)
def test_unusable_queries(shape: tuple[int, ...]) -> None:
    session, _, _ = _session(30, 20)
    with pytest.raises(ValueError, match=r"call update\(\)"):
        session.attention(torch.zeros(1, 4, 1, HEAD_SIZE), 0)
    states = _random_states(1, 0)
    session.update(states, states, 0)
    with pytest.raises(ValueError, match="query: shape"):
        session.attention(torch.zeros(shape), 0)


def test_layers_that_do_not_exist() -> None:
    session, _, _ = _session(30, 20)
    for layer_idx in (-1, 1):
        with pytest.raises(ValueError, match=f"layer {layer_idx} of 1"):
            session.attention(torch.zeros(1, 4, 1, HEAD_SIZE), layer_idx)


def test_beams_cannot_be_reordered() -> None:
    session, _, _ = _session(30, 20)
    session.reorder_cache(torch.tensor([0]))
    session.batch_repeat_interleave(1)
    session.batch_select_indices(torch.tensor([0]))
    for use in (
        lambda: session.reorder_cache(torch.tensor([1, 0])),
        lambda: session.batch_repeat_interleave(2),
        lambda: session.batch_select_indices(torch.tensor([0, 0])),
    ):
        with pytest.raises(ValueError, match="a session holds one sequence"):
            use()


def test_training_queries_come_from_every_head_and_any_chunks() -> None:
    samples = []
    for chunks in ([40], [1, 13, 26]):
        db = small_db(train_queries_per_key=0.5)
        session, _ = db.create_session(range(40))
        generator = torch.Generator().manual_seed(0)
        queries = torch.randn(1, 4, 40, HEAD_SIZE, generator=generator)
        states = _random_states(40, 1)
        begin = 0
        for size in chunks:
            part = slice(begin, begin + size)
            session.update(states[:, :, part], states[:, :, part], 0)
            session.attention(queries[:, :, part], 0)
            begin += size
        db.store(session)
        index = db._store.contexts()[0].index(0, 1)
        assert isinstance(index, BruteForceIndex) and index.train_queries is not None
        samples.append(index.train_queries.data)
    assert np.array_equal(*samples)
    places = [np.argwhere((queries[0].numpy() == row).all(-1))[0].tolist() for row in samples[0]]
    heads, tokens = zip(*places, strict=True)
    assert len(places) == 20
    assert sorted(set(heads)) == [2, 3]
    assert list(tokens) == sorted(tokens)

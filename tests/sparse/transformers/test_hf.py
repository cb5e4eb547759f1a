# SPDX-License-Identifier: Apache-2.0
"""relay_sparse in transformers models: the same tokens as sdpa where everything is read."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, DynamicCache, StaticCache
from transformers.masking_utils import sdpa_mask

from tests.sparse.tiny_models import (
    FAMILIES,
    generate,
    logits,
    random_tokens,
    small_db,
    stored,
    tiny_model,
)
from vllm_relay.sparse import Dipr
from vllm_relay.sparse.transformers import hf
from vllm_relay.sparse.transformers.session_states import SessionStates

CONTEXT = random_tokens(90)
PROMPT = torch.cat([CONTEXT, random_tokens(10, seed=1)], 1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", ["whole prompt", "rest of the prompt"])
def test_generate_gives_the_tokens_of_sdpa(family: str, form: str) -> None:
    model = tiny_model(family)
    db = small_db()
    stored(db, model, CONTEXT)
    session, remaining = db.create_session(PROMPT)
    if form == "whole prompt":
        output = generate(model, PROMPT, past_key_values=session)
    else:
        assert remaining.tolist() == PROMPT[:, 90:].tolist()
        output = model.generate(**session.inputs(remaining), max_new_tokens=8, do_sample=False)
    wanted = generate(tiny_model(family, "sdpa"), PROMPT)
    assert output[0, -8:].tolist() == wanted[0, -8:].tolist()
    # 7 decode steps, 2 layers, 2 kv heads
    assert session.stats.searches == 28
    assert session.stats.retrieved_tokens == session.stats.searched_tokens == 28 * (90 - 4 - 8)


@pytest.mark.parametrize("index", ["flat", "auto", "graph"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_range_that_takes_everything_is_dense_attention(index: str, dtype: torch.dtype) -> None:
    model, sdpa = (
        copy.deepcopy(tiny_model("llama", name)).to(dtype) for name in ("relay_sparse", "sdpa")
    )
    db = small_db(index=index, index_factory=None, query=Dipr(alpha=1e-30))
    stored(db, model, CONTEXT)
    session, remaining = db.create_session(PROMPT)
    logits(model, remaining, session)
    step = logits(model, torch.tensor([[7]]), session)
    wanted = logits(sdpa, torch.cat([PROMPT, torch.tensor([[7]])], 1))[100:]
    assert session.stats.retrieved_tokens == session.stats.searched_tokens > 0
    tolerance = 1e-4 if dtype == torch.float32 else 0.02 * wanted.float().abs().max().item()
    torch.testing.assert_close(step, wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_a_decode_step_are_those_of_dense_attention(family: str) -> None:
    model = tiny_model(family)
    db = small_db()
    stored(db, model, CONTEXT)
    session, remaining = db.create_session(PROMPT)
    prefill = logits(model, remaining, session)
    step = logits(model, torch.tensor([[7]]), session)
    wanted = logits(tiny_model(family, "sdpa"), torch.cat([PROMPT, torch.tensor([[7]])], 1))
    torch.testing.assert_close(prefill, wanted[90:100], rtol=0, atol=1e-4)
    torch.testing.assert_close(step, wanted[100:], rtol=0, atol=1e-4)
    assert session.stats.searches == 4


@pytest.mark.parametrize("family", ["mistral", "qwen2"])
@pytest.mark.parametrize("context_tokens", [10, 15, 16, 17, 90])
def test_sliding_window_layers_are_exact(family: str, context_tokens: int) -> None:
    model = tiny_model(family, sliding=True)
    db = small_db()
    context = CONTEXT[:, :context_tokens]
    stored(db, model, context)
    prompt = torch.cat([context, random_tokens(5, seed=1)], 1)
    session, remaining = db.create_session(prompt)
    assert remaining.shape[1] == 5
    prefill = logits(model, remaining, session)
    step = logits(model, torch.tensor([[7]]), session)
    whole = torch.cat([prompt, torch.tensor([[7]])], 1)
    wanted = logits(tiny_model(family, "sdpa", sliding=True), whole)
    torch.testing.assert_close(torch.cat([prefill, step]), wanted[-6:], rtol=0, atol=1e-4)


@pytest.mark.parametrize("cache", [None, "dynamic", "static"])
@pytest.mark.parametrize("padding", [0, 3])
def test_without_a_session_it_is_sdpa_to_the_last_bit(cache: str | None, padding: int) -> None:
    outputs = []
    for attention in ("relay_sparse", "sdpa"):
        model = tiny_model("llama", attention)
        mask = torch.ones(2, 100, dtype=torch.long)
        mask[1, :padding] = 0
        states: Any = {
            None: lambda: None,
            "dynamic": DynamicCache,
            "static": lambda model=model: StaticCache(model.config, max_cache_len=120),
        }[str(cache) if cache else None]()
        with torch.no_grad():
            done = model(
                PROMPT.expand(2, -1), attention_mask=mask, past_key_values=states, use_cache=False
            )
        outputs.append(done.logits)
    assert torch.equal(outputs[0], outputs[1])


def test_masks_without_a_session_are_those_of_sdpa() -> None:
    sizes = {"batch_size": 1, "q_length": 3, "kv_length": 8, "q_offset": 5}
    assert torch.equal(hf.relay_sparse_mask(**sizes), sdpa_mask(**sizes))


def test_no_mask_is_made_for_a_prompt_behind_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    db = small_db()
    stored(db, model, CONTEXT)
    seen = []
    relay = hf.relay_sparse_attention

    def spy(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        seen.append((mask, type(key)))
        return relay(module, query, key, value, mask, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, hf.NAME, spy)
    session, remaining = db.create_session(PROMPT)
    logits(model, remaining, session)
    assert seen == [(None, SessionStates)] * 2


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_session_is_exact_with_any_other_attention(attention: str) -> None:
    model = tiny_model("llama")
    db = small_db()
    stored(db, model, CONTEXT)
    session, _ = db.create_session(PROMPT)
    output = generate(tiny_model("llama", attention), PROMPT, past_key_values=session)
    assert output.tolist() == generate(tiny_model("llama", attention), PROMPT).tolist()
    assert session.stats.searches == 0


def test_two_models_one_after_the_other_layer_by_layer() -> None:
    """Attention of one model between update and attention of another one."""
    db = small_db()
    sessions, queries, keys = [], [], []
    for seed in (0, 1):
        torch.manual_seed(seed)
        session, _ = db.create_session([1, 2, 3])
        k, v = torch.randn(2, 1, 2, 3, 16)
        sessions.append(session)
        keys.append((k, v, *session.update(k, v, 0)))
        queries.append(torch.randn(1, 4, 3, 16))
    module = torch.nn.Module()
    for session, query, (k, v, key, value) in zip(sessions, queries, keys, strict=True):
        output, _ = hf.relay_sparse_attention(module, query, key, value, None, is_causal=None)
        wanted = torch.nn.functional.scaled_dot_product_attention(
            query, k, v, is_causal=True, enable_gqa=True
        )
        torch.testing.assert_close(output, wanted.transpose(1, 2))
        session.close()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"attention_mask": torch.ones(1, 10, dtype=torch.long)}, "covers 10 tokens"),
        ({"attention_mask": torch.arange(100)[None] % 7}, "hides tokens"),
        ({"attention_mask": torch.ones(1, 1, 10, 100)}, "masks of your own"),
        ({"position_ids": torch.arange(10)[None]}, "position_ids begin at 0"),
    ],
)
def test_what_a_session_cannot_serve_is_refused(kwargs: Any, message: str) -> None:
    model = tiny_model("llama")
    db = small_db()
    stored(db, model, CONTEXT)
    session, remaining = db.create_session(PROMPT)
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        model(remaining, past_key_values=session, **kwargs)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_beams": 2}, "a batch of 2"),
        ({"do_sample": True, "num_return_sequences": 3}, "a batch of 3"),
    ],
)
def test_several_sequences_are_refused(kwargs: Any, message: str) -> None:
    session, _ = small_db().create_session(PROMPT)
    with pytest.raises(ValueError, match=message):
        tiny_model("llama").generate(PROMPT, past_key_values=session, max_new_tokens=4, **kwargs)


@pytest.mark.parametrize("num_remaining", [10, 25, 40, 60])
def test_the_rest_of_a_prompt_alone_is_refused(num_remaining: int) -> None:
    """generate() takes it for the whole prompt and would leave out its first tokens."""
    model = tiny_model("llama")
    db = small_db()
    context = random_tokens(30)
    stored(db, model, context)
    session, remaining = db.create_session(
        torch.cat([context, random_tokens(num_remaining, seed=1)], 1)
    )
    assert remaining.shape[1] == num_remaining
    with pytest.raises(ValueError, match=r"session\.inputs\(remaining\)"):
        generate(model, remaining, 1, past_key_values=session)


def test_decoding_before_the_prompt_has_ended_is_refused() -> None:
    model = tiny_model("llama")
    session, _ = small_db().create_session(PROMPT)
    logits(model, PROMPT[:, :50], session)
    logits(model, PROMPT[:, 50:99], session)
    logits(model, PROMPT[:, 99:], session)
    session, _ = small_db().create_session(PROMPT)
    logits(model, PROMPT[:, :50], session)
    with pytest.raises(ValueError, match="51 of the prompt's 100 tokens"):
        logits(model, PROMPT[:, 50:51], session)


def test_a_prompt_in_chunks() -> None:
    model = tiny_model("llama")
    session, _ = small_db().create_session(PROMPT)
    output = generate(model, PROMPT, past_key_values=session, prefill_chunk_size=33)
    assert output.tolist() == generate(tiny_model("llama", "sdpa"), PROMPT).tolist()


@pytest.mark.parametrize("form", ["whole prompt", "rest of the prompt"])
def test_chunks_behind_a_context_are_refused(form: str) -> None:
    """transformers cuts the prompt as if its cache were empty."""
    model = tiny_model("llama")
    db = small_db()
    stored(db, model, CONTEXT)
    session, remaining = db.create_session(PROMPT)
    inputs = session.inputs(remaining)
    if form == "whole prompt":
        inputs = {"input_ids": PROMPT, "past_key_values": session}
    with pytest.raises(ValueError, match=r"session\.inputs"):
        model.generate(**inputs, max_new_tokens=3, prefill_chunk_size=4)


def test_gradients_and_dropout_are_refused() -> None:
    model = tiny_model("llama")
    session, _ = small_db().create_session(PROMPT)
    with pytest.raises(ValueError, match="no_grad"):
        model(PROMPT, past_key_values=session)
    keys = torch.randn(1, 2, 3, 16)
    key, value = session.update(keys, keys, 0)
    with pytest.raises(ValueError, match="dropout"):
        hf.relay_sparse_attention(
            torch.nn.Module(), torch.randn(1, 4, 3, 16), key, value, None, dropout=0.1
        )


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias"])
def test_scores_of_another_form_are_refused(name: str) -> None:
    session, _ = small_db().create_session(PROMPT)
    keys = torch.randn(1, 2, 3, 16)
    key, value = session.update(keys, keys, 0)
    with pytest.raises(ValueError, match=name):
        hf.relay_sparse_attention(
            torch.nn.Module(), torch.randn(1, 4, 3, 16), key, value, None, **{name: 1.0}
        )


def test_another_model_is_refused() -> None:
    db = small_db()
    stored(db, tiny_model("llama"), CONTEXT)
    session, remaining = db.create_session(PROMPT)
    with pytest.raises(ValueError, match="another model: .*model_type 'qwen3' for 'llama'"):
        logits(tiny_model("qwen3"), remaining, session)


def test_inference_mode() -> None:
    model = tiny_model("llama")
    db = small_db()
    stored(db, model, CONTEXT)
    session, remaining = db.create_session(PROMPT)
    with torch.inference_mode():
        output = model(remaining, past_key_values=session).logits[0]
    wanted = logits(tiny_model("llama", "sdpa"), PROMPT)[90:]
    torch.testing.assert_close(output, wanted, rtol=0, atol=1e-4)

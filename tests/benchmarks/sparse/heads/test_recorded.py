# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.sparse.heads import recorded
from benchmarks.sparse.heads.recorded import LayerTensors, head_of, record_attention
from tests.benchmarks.sparse.heads.head_statistics import softmax_weights

TOKENS, HEADS, KV_HEADS, HEAD_SIZE = 150, 4, 2, 16


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=100,
            hidden_size=48,
            intermediate_size=32,
            num_hidden_layers=3,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=HEAD_SIZE,
            initializer_range=0.5,
        )
    ).eval()


@pytest.fixture(scope="module")
def token_ids() -> list[int]:
    return np.random.default_rng(0).integers(0, 100, TOKENS).tolist()


@pytest.fixture(scope="module")
def layers(model: LlamaForCausalLM, token_ids: list[int]) -> list[LayerTensors]:
    return record_attention(model, token_ids, chunk_tokens=64)


def assert_attention_is_reproduced(layer: LayerTensors) -> None:
    """softmax(q k) v over the keys up to each token is what the model computed."""
    num_tokens = len(layer.keys)
    for head in range(layer.queries.shape[1]):
        kv_head = head // layer.group_size
        for token in {0, 1, 63, 64, num_tokens // 2, num_tokens - 1}:
            seen = slice(0, token + 1)
            weights = softmax_weights(
                layer.queries[token : token + 1, head], layer.keys[seen, kv_head], layer.scale
            )
            output = weights[0] @ layer.values[seen, kv_head]
            np.testing.assert_allclose(output, layer.outputs[token, head], atol=2e-5)


def test_shapes(layers: list[LayerTensors]) -> None:
    assert len(layers) == 3
    for layer in layers:
        assert layer.queries.shape == layer.outputs.shape == (TOKENS, HEADS, HEAD_SIZE)
        assert layer.keys.shape == layer.values.shape == (TOKENS, KV_HEADS, HEAD_SIZE)
        assert layer.group_size == HEADS // KV_HEADS
        assert layer.queries.dtype == layer.keys.dtype == np.float32


def test_attention_is_reproduced(layers: list[LayerTensors]) -> None:
    for layer in layers:
        assert_attention_is_reproduced(layer)


def test_heads_of_the_recall_model() -> None:
    layers = recorded.recall_model_layers(200)
    assert len(layers) == 2
    for layer in layers:
        assert layer.queries.shape == (200, 4, 128)
        assert layer.keys.shape == (200, 2, 128)
        assert_attention_is_reproduced(layer)
    # the haystack ends in a pair of tokens that occurred before: one key matches
    weights = softmax_weights(layers[1].queries[-1:, 0], layers[1].keys[:, 0], layers[1].scale)
    assert weights.max() > 0.99


def test_chunks_do_not_matter(
    model: LlamaForCausalLM, token_ids: list[int], layers: list[LayerTensors]
) -> None:
    for whole, chunked in zip(record_attention(model, token_ids), layers, strict=True):
        np.testing.assert_allclose(whole.queries, chunked.queries, atol=1e-3)
        np.testing.assert_allclose(whole.keys, chunked.keys, atol=1e-3)


def test_the_model_gets_its_own_attention_back(model: LlamaForCausalLM) -> None:
    before = model.config._attn_implementation
    record_attention(model, [1, 2, 3])
    assert model.config._attn_implementation == before != recorded.IMPLEMENTATION


def test_last_tokens_of_a_head_ask_for_those_before(layers: list[LayerTensors]) -> None:
    layer = layers[1]
    head = head_of(layer, 1, tests=30, train=90, name="here")
    assert (head.name, head.num_keys, head.prefix_len) == ("here", TOKENS - 30, TOKENS - 30)
    np.testing.assert_array_equal(head.keys, layer.keys[:120, 1])
    np.testing.assert_array_equal(head.values, layer.values[:120, 1])
    np.testing.assert_array_equal(head.queries, layer.queries[120:, 2:])
    known = {row.tobytes() for row in layer.queries[:120, 2:].reshape(-1, HEAD_SIZE)}
    drawn = {row.tobytes() for row in head.train_queries}
    assert len(drawn) == 90
    assert drawn < known


def test_training_queries_are_as_many_as_there_are(layers: list[LayerTensors]) -> None:
    assert head_of(layers[0], 0, tests=100, train=1000).train_queries.shape == (100, HEAD_SIZE)


def test_unusable_arguments_are_refused(
    model: LlamaForCausalLM, layers: list[LayerTensors]
) -> None:
    with pytest.raises(ValueError, match="token_ids is empty"):
        record_attention(model, [])
    with pytest.raises(ValueError, match="kv_head is 2, expected 0 to 1"):
        head_of(layers[0], 2, tests=1, train=1)
    with pytest.raises(ValueError, match="tests is 150, expected 1 to 149"):
        head_of(layers[0], 0, tests=TOKENS, train=1)

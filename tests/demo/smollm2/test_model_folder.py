# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.demo.smollm2.gguf_writer import f32_tensor, q8_0_tensor, write_gguf
from vllm_relay.demo.smollm2.gguf import GgufFile
from vllm_relay.demo.smollm2.model_folder import hugging_face_name, write_model_folder

HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, LAYERS = 64, 4, 2, 16, 2
SPACE = "\u0120"  # as byte-level BPE writes it
TOKENS = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("0123456789abct" + SPACE),
    *("12", "at", "cat"),
]
VALUES = {
    "llama.vocab_size": 32,
    "llama.context_length": 128,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": 96,
    "llama.block_count": LAYERS,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.rope.dimension_count": HEAD_SIZE,
    "llama.rope.freq_base": 100.0,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(TOKENS) - 3),
    "tokenizer.ggml.merges": ["1 2", "a t", "c at"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}",
}


def whole_numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(-3, 4, shape)).float() / 1


def pairs_together(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """As GGUF has them: row 2 i of a head is row i of transformers, 2 i + 1 is i + half."""
    rows = weight.reshape(num_heads, HEAD_SIZE, -1)
    order = [i // 2 + i % 2 * (HEAD_SIZE // 2) for i in range(HEAD_SIZE)]
    return rows[:, order].reshape(weight.shape)


@pytest.fixture(scope="module")
def expected() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=32, hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0}, rms_norm_eps=1e-5,
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for number, (name, weight) in enumerate(model.state_dict().items()):
        if name != "lm_head.weight":
            weight.copy_(whole_numbers(*weight.shape, seed=number))
    return model


@pytest.fixture(scope="module")
def folder(expected: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = {}
    parts = {"attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj",
             "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
             "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
             "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
             "ffn_down": "mlp.down_proj"}  # fmt: skip
    weights = {name: weight.float() for name, weight in expected.state_dict().items()}
    named = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"} | {
        f"blk.{layer}.{ours}": f"model.layers.{layer}.{theirs}"
        for layer in range(LAYERS)
        for ours, theirs in parts.items()
    }
    for name, theirs in named.items():
        weight = weights[f"{theirs}.weight"]
        if name.endswith("attn_q"):
            weight = pairs_together(weight, HEADS)
        if name.endswith("attn_k"):
            weight = pairs_together(weight, KV_HEADS)
        made = f32_tensor if weight.ndim == 1 else q8_0_tensor
        tensors[f"{name}.weight"] = made(weight.numpy())
    folder = tmp_path_factory.mktemp("model")
    write_model_folder(GgufFile(write_gguf(folder / "made.gguf", VALUES, tensors)), folder)
    return folder


def test_the_model_computes_the_same(folder: Path, expected: LlamaForCausalLM) -> None:
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert model.config.head_dim == HEAD_SIZE
    for name, weight in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name
    tokens = torch.randint(32, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, expected(tokens).logits)


def test_the_tokenizer_merges_words_and_no_digits(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("cat12") == ["cat", "1", "2"]
    assert tokenizer.decode(tokenizer.encode("a cat 120")) == "a cat 120"
    assert tokenizer.encode("<|im_start|>cat<|im_end|>") == [1, TOKENS.index("cat"), 2]
    assert tokenizer.eos_token_id == 2
    chat = [{"role": "user", "content": "cat"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<|im_start|>cat"


@pytest.mark.parametrize("name", ["output.weight", "blk.0.attn_q.bias", "blk.0.rope.weight"])
def test_other_weights_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"tensor {name}: expected those of a Llama"):
        hugging_face_name(name)

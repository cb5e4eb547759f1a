# SPDX-License-Identifier: Apache-2.0
"""A Llama in a GGUF file becomes a Hugging Face folder: configuration, weights, tokenizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from vllm_relay.demo.smollm2.gguf import GgufFile

_CONTROL_TOKEN = 3  # a type of tokens in GGUF
_LAYER_WEIGHTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_WEIGHTS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def write_model_folder(gguf: GgufFile, folder: Path) -> None:
    """Writes a model whose input and output embeddings are one, in bfloat16.

    Args:
        folder: it is there.

    Raises:
        ValueError: a tensor that no such model has.
    """
    config = llama_config(gguf)
    weights = {}
    for name in gguf.tensor_names:
        weight = gguf.tensor(name)
        if ".attn_q." in name:
            weight = _halves_apart(weight, gguf.values["llama.attention.head_count"])
        elif ".attn_k." in name:
            weight = _halves_apart(weight, gguf.values["llama.attention.head_count_kv"])
        weights[hugging_face_name(name)] = torch.from_numpy(weight).to(torch.bfloat16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    tokens = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
    GenerationConfig(**tokens).save_pretrained(folder)
    tokenizer(gguf).save_pretrained(folder)


def hugging_face_name(name: str) -> str:
    """Of a weight.

    Raises:
        ValueError: no such weight is known.
    """
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in _LAYER_WEIGHTS:
            return f"model.layers.{layer}.{_LAYER_WEIGHTS[part]}.weight"
        case [part, "weight"] if part in _OTHER_WEIGHTS:
            return f"{_OTHER_WEIGHTS[part]}.weight"
    raise ValueError(f"tensor {name}: expected those of a Llama with one embedding for both ends")


def llama_config(gguf: GgufFile) -> LlamaConfig:
    values = gguf.values
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        vocab_size=values["llama.vocab_size"],
        max_position_embeddings=values["llama.context_length"],
        hidden_size=values["llama.embedding_length"],
        intermediate_size=values["llama.feed_forward_length"],
        num_hidden_layers=values["llama.block_count"],
        num_attention_heads=values["llama.attention.head_count"],
        num_key_value_heads=values["llama.attention.head_count_kv"],
        head_dim=values["llama.rope.dimension_count"],
        rope_parameters={"rope_type": "default", "rope_theta": values["llama.rope.freq_base"]},
        rms_norm_eps=values["llama.attention.layer_norm_rms_epsilon"],
        tie_word_embeddings=True,
        bos_token_id=values["tokenizer.ggml.bos_token_id"],
        eos_token_id=values["tokenizer.ggml.eos_token_id"],
        pad_token_id=values["tokenizer.ggml.padding_token_id"],
    )


def tokenizer(gguf: GgufFile) -> PreTrainedTokenizerFast:
    """Byte-level BPE in which every digit is a token, with the model's chat template."""
    values = gguf.values
    tokens = values["tokenizer.ggml.tokens"]
    types = values["tokenizer.ggml.token_type"]
    merges = [tuple(pair.split(" ")) for pair in values["tokenizer.ggml.merges"]]
    bpe = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True),
         pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )  # fmt: skip
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, kind in zip(tokens, types, strict=True)
            if kind == _CONTROL_TOKEN
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=tokens[values["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[values["tokenizer.ggml.eos_token_id"]],
        pad_token=tokens[values["tokenizer.ggml.padding_token_id"]],
        unk_token=tokens[values["tokenizer.ggml.unknown_token_id"]],
        chat_template=values["tokenizer.chat_template"],
        model_max_length=values["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )


def _halves_apart(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a head in the order that transformers rotates: first parts of all pairs, then second
    parts. GGUF has the parts of a pair side by side."""
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[-1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weight.shape))

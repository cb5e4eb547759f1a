# SPDX-License-Identifier: Apache-2.0
"""Tiny models with random weights, written as checkpoints vLLM can load."""

from __future__ import annotations

from pathlib import Path

VOCAB_SIZE = 512
MAX_MODEL_LEN_TOKENS = 512


def save_model(kind: str, directory: Path) -> Path:
    """Write a model of ``kind`` ("llama" or "gemma2") to ``directory``.

    gemma2 has soft-capped scores and alternates between full attention and a window of 64 tokens,
    so that vLLM keeps two KV cache groups.
    """
    import torch
    from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

    shape = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": MAX_MODEL_LEN_TOKENS,
        # wide enough for a clear best token at most positions
        "initializer_range": 0.2,
        "torch_dtype": "float32",
    }
    torch.manual_seed(0)
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**shape))
    elif kind == "gemma2":
        model = Gemma2ForCausalLM(
            Gemma2Config(
                **shape,
                sliding_window=64,
                attn_logit_softcapping=20.0,
                query_pre_attn_scalar=32,
                attn_implementation="eager",
            )
        )
    else:
        raise ValueError(f"model kind {kind!r} was given, expected 'llama' or 'gemma2'")
    model.save_pretrained(directory)
    return directory

# SPDX-License-Identifier: Apache-2.0
"""Small models with random weights, of every family that sessions are promised for."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from tests.sparse.brute_force_index import BruteForceIndex
from vllm_relay.sparse import DB, Dipr

VOCAB_SIZE = 64
EVERYTHING = Dipr(beta=1e30)

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    # large weights: with the usual ones all logits are alike
    "initializer_range": 0.3,
    "pad_token_id": None,
    "eos_token_id": None,
}
_CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_SIZES),
    "qwen2": Qwen2Config(**_SIZES),
    "qwen3": Qwen3Config(**_SIZES),
    "mistral": MistralConfig(**_SIZES, sliding_window=None),
}
FAMILIES = tuple(_CONFIGS)
SLIDING_WINDOW_TOKENS = 16
_SLIDING: dict[str, PreTrainedConfig] = {
    "mistral": MistralConfig(**_SIZES, sliding_window=SLIDING_WINDOW_TOKENS),
    "qwen2": Qwen2Config(
        **_SIZES,
        use_sliding_window=True,
        sliding_window=SLIDING_WINDOW_TOKENS,
        layer_types=["full_attention", "sliding_attention"],
    ),
}


@functools.cache
def tiny_model(family: str, attention: str = "relay_sparse", *, sliding: bool = False) -> Any:
    """The same weights for every attention; each has a model of its own."""
    config = copy.deepcopy((_SLIDING if sliding else _CONFIGS)[family])
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model.eval()


def random_tokens(count: int, seed: int = 0) -> torch.Tensor:
    """[1, count]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (1, count), generator=generator)


def small_db(**options: Any) -> DB:
    """A database that searches contexts of any length and, unless told otherwise, retrieves
    everything."""
    defaults: dict[str, Any] = {
        "sink_tokens": 4,
        "recent_tokens": 8,
        "min_context_tokens": 0,
        "query": EVERYTHING,
        "index_factory": lambda layer: BruteForceIndex(),
    }
    return DB(options={**defaults, **options})


def generate(model: Any, input_ids: torch.Tensor, max_new_tokens: int = 8, **kwargs: Any) -> Any:
    """Greedy."""
    return model.generate(input_ids, max_new_tokens=max_new_tokens, do_sample=False, **kwargs)


@torch.no_grad()
def logits(model: Any, input_ids: torch.Tensor, cache: Any = None) -> torch.Tensor:
    """[tokens, vocabulary]"""
    return model(input_ids, past_key_values=cache, use_cache=cache is not None).logits[0]


@torch.no_grad()
def stored(db: DB, model: Any, input_ids: torch.Tensor) -> str:
    """The id of a context with these tokens."""
    with db.create_session(input_ids)[0] as session:
        model(input_ids[:, session.get_seq_length() :], past_key_values=session)
        return db.store(session)

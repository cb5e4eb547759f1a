# SPDX-License-Identifier: Apache-2.0
"""A model whose queries are those of the head corpus, and a long context for it to read.

The embedding of token t is what the query heads of test token t of the corpus have before they are
rotated; q_proj is the identity, o_proj and down_proj are zero, so that every layer asks these
queries whatever it attends. The context holds the corpus's keys and values, as if the model had
computed them. Which token comes next is as good as random.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.sparse.heads.corpus import Head, make_head
from benchmarks.sparse.heads.rope import ROPE_THETA
from benchmarks.support.model import Model
from vllm_relay.sparse.contexts.train_queries import NUM_LAST_TOKENS
from vllm_relay.sparse.index.elements import from_float32

HEAD_SIZE = 128
HEAD_NOISE = 0.25


@dataclass(frozen=True)
class Geometry:
    """Of Llama-3-8B, cut to two layers and to a small MLP, which attention does not see."""

    num_layers: int = 2
    num_heads: int = 32
    num_kv_heads: int = 8
    intermediate_size: int = 256
    num_queries: int = 512
    """Distinct queries, and tokens of the vocabulary."""

    @property
    def hidden_size(self) -> int:
        return self.num_heads * HEAD_SIZE

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads


def corpus_heads(geometry: Geometry, num_tokens: int, num_distinct: int) -> list[Head]:
    """One for each kv head of a layer; the first `num_distinct` have keys of their own."""
    return [
        make_head(
            "rope",
            keys=num_tokens,
            train=min(int(0.4 * num_tokens), 40_000),
            tests=geometry.num_queries + NUM_LAST_TOKENS,
            heads=geometry.group,
            head_noise=HEAD_NOISE,
            seed=seed,
        )
        for seed in range(min(num_distinct, geometry.num_kv_heads))
    ]


def save_model(geometry: Geometry, heads: list[Head], max_model_len: int, folder: Path) -> str:
    """Writes the model that asks the heads' queries and returns the folder's name."""
    hidden, size = geometry.hidden_size, geometry.num_kv_heads * HEAD_SIZE
    raw = [_unrotated(head)[: geometry.num_queries] for head in heads]
    per_kv_head = [
        # distinct queries where keys repeat
        np.roll(raw[i % len(raw)], i // len(raw), axis=0)
        for i in range(geometry.num_kv_heads)
    ]
    embedding = np.concatenate(per_kv_head, 1).reshape(geometry.num_queries, hidden)
    rms = float(np.sqrt((embedding**2).mean()))
    rng = torch.Generator().manual_seed(0)

    def bf16(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(torch.bfloat16)

    vocab = geometry.num_queries
    weights = {
        "model.embed_tokens.weight": bf16(torch.from_numpy(embedding)),
        "model.norm.weight": bf16(torch.ones(hidden)),
        "lm_head.weight": bf16(torch.randn(vocab, hidden, generator=rng)),
    }
    for layer in range(geometry.num_layers):
        name = f"model.layers.{layer}"
        mlp = geometry.intermediate_size
        weights |= {
            f"{name}.input_layernorm.weight": bf16(torch.full((hidden,), rms)),
            f"{name}.post_attention_layernorm.weight": bf16(torch.ones(hidden)),
            f"{name}.self_attn.q_proj.weight": bf16(torch.eye(hidden)),
            f"{name}.self_attn.k_proj.weight": bf16(torch.zeros(size, hidden)),
            f"{name}.self_attn.v_proj.weight": bf16(torch.zeros(size, hidden)),
            f"{name}.self_attn.o_proj.weight": bf16(torch.zeros(hidden, hidden)),
            f"{name}.mlp.gate_proj.weight": bf16(torch.zeros(mlp, hidden)),
            f"{name}.mlp.up_proj.weight": bf16(torch.zeros(mlp, hidden)),
            f"{name}.mlp.down_proj.weight": bf16(torch.zeros(hidden, mlp)),
        }
    os.makedirs(folder, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model = Model(
        hidden_size=hidden,
        intermediate_size=geometry.intermediate_size,
        num_heads=geometry.num_heads,
        num_kv_heads=geometry.num_kv_heads,
        num_layers=geometry.num_layers,
        vocab_size=vocab,
    )
    return model.save(
        folder, max_position_embeddings=max_model_len, rope_theta=ROPE_THETA, rms_norm_eps=1e-6
    )


def _unrotated(head: Head) -> np.ndarray:
    """Queries before rotary embedding: [tests, heads, size]."""
    half = HEAD_SIZE // 2
    positions = head.prefix_len + np.arange(len(head.queries))
    angle = np.outer(positions, ROPE_THETA ** (-np.arange(half) / half))[:, None]
    cosine, sine = np.cos(angle), np.sin(angle)
    first, second = head.queries[..., :half], head.queries[..., half:]
    raw = np.concatenate([first * cosine + second * sine, second * cosine - first * sine], axis=2)
    return raw.astype(np.float32)


def store_context(llm: Any, geometry: Geometry, heads: list[Head], tokens: np.ndarray) -> list[str]:
    """Makes `tokens` a stored context of an engine in this process, with the heads' keys.

    Returns:
        the kinds of the indexes that the heads got.
    """
    from vllm_relay.long_context.host.worker import make_worker
    from vllm_relay.sparse.contexts.context_store import HeadStates
    from vllm_relay.sparse.plan.index_choice import build_index

    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    contexts = make_worker(worker.vllm_config).open_contexts(worker)
    options = contexts.options.model_copy(update={"threads": torch.get_num_threads()})
    built = []
    for head in heads:
        keys, values, train = (
            from_float32(each, "bfloat16") for each in (head.keys, head.values, head.train_queries)
        )
        # the first ones are those that the engine will ask
        last = head.queries[-NUM_LAST_TOKENS:]
        index, plan = build_index(
            1, keys, values, train, geometry.group, options, last_queries=last
        )
        built.append(HeadStates(keys, values, index, train, plan))
    layer = [built[i % len(built)] for i in range(geometry.num_kv_heads)]
    contexts.add(tokens, [layer] * geometry.num_layers)
    return [states.index.kind for states in built]

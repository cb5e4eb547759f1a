# SPDX-License-Identifier: Apache-2.0
"""Whose keys and values a worker computes."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import torch

from vllm_relay.sparse.contexts.context_fingerprint import ContextFingerprint
from vllm_relay.sparse.contexts.model_fingerprint import config_fingerprint, weights_digest

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def fingerprint_of(
    vllm_config: VllmConfig,
    model: torch.nn.Module,
    *,
    num_layers: int,
    num_kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    rank: int,
) -> ContextFingerprint:
    """What a worker's contexts are written with and looked for by.

    Args:
        model: as loaded in this worker: a part of the whole where tensors are parallel.
        num_kv_heads: of this worker.
        dtype: of the KV cache.
        rank: among the workers that are tensor parallel.
    """
    config = vllm_config.model_config.hf_text_config
    fields: dict[str, Any] = {
        **config_fingerprint(config),
        "weights": weights_digest(model),
        "quantization": vllm_config.model_config.quantization,
        "rank": [rank, vllm_config.parallel_config.tensor_parallel_size],
    }
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    return ContextFingerprint(
        model=str(config.model_type),
        model_hash=digest,
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        dtype=str(dtype).removeprefix("torch."),
        rope=fields["rope_parameters"] or {},
    )

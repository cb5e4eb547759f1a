# SPDX-License-Identifier: Apache-2.0
"""What of a model decides its keys and values."""

from __future__ import annotations

import hashlib
import json
import threading
from typing import Any

import torch

from vllm_relay.sparse.contexts.context_fingerprint import ContextFingerprint

_CONFIG_FIELDS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "rope_parameters",
    "rope_theta",
    "rope_scaling",
    "max_position_embeddings",
    "layer_types",
    "sliding_window",
    "dtype",
)
_SAMPLES_PER_PARAMETER = 64


def config_fingerprint(config: Any) -> dict[str, Any]:
    """The fields of a transformers configuration that change keys and values, as JSON has them."""
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    fields = {name: getattr(text_config, name, None) for name in _CONFIG_FIELDS}
    return json.loads(json.dumps(fields, default=str, sort_keys=True))


def model_fingerprint(model: Any) -> dict[str, Any]:
    """`config_fingerprint` of a model, and a checksum over a sample of every parameter.

    Args:
        model: a transformers model, or its configuration (the weights are unknown then).

    Raises:
        ValueError: neither.
    """
    if isinstance(model, type) or not hasattr(getattr(model, "config", model), "get_text_config"):
        raise ValueError(
            f"model: given {model!r}, expected a transformers model or its configuration"
        )
    if not isinstance(model, torch.nn.Module):
        return {**config_fingerprint(model), "weights": None}
    return {**config_fingerprint(model.config), "weights": weights_digest(model)}


def weights_digest(model: torch.nn.Module) -> str:
    """Of a sample of every parameter."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().flatten()
        stride = max(1, flat.numel() // _SAMPLES_PER_PARAMETER)
        digest.update(f"{name} {tuple(parameter.shape)} ".encode())
        digest.update(flat[::stride].float().cpu().numpy().tobytes())
    return digest.hexdigest()


def context_fingerprint(model: Any) -> ContextFingerprint:
    """What contexts of a model are written with and looked for by.

    Args:
        model: as for `model_fingerprint`.
    """
    config = getattr(model, "config", model).get_text_config()
    num_heads = config.num_attention_heads
    return fingerprint_of(
        config.model_type,
        model_fingerprint(model),
        num_layers=config.num_hidden_layers,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
        dtype=getattr(model, "dtype", None) or torch.float32,
    )


def fingerprint_of(
    model_type: str, fields: dict[str, Any], *, dtype: torch.dtype, **sizes: int
) -> ContextFingerprint:
    """Args: fields: `config_fingerprint`, and what else decides keys and values; all of it hashed.
    dtype, sizes: as those of the fingerprint."""
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    rope = fields["rope_parameters"] or {}
    dtype_name = str(dtype).removeprefix("torch.")
    return ContextFingerprint(model_type, digest, dtype=dtype_name, rope=rope, **sizes)


class ModelBinding:
    """The model whose contexts a database holds: given, or the first one that attends."""

    def __init__(self, model: Any = None) -> None:
        self.fingerprint = None if model is None else model_fingerprint(model)
        self._lock = threading.Lock()

    @property
    def group_size(self) -> int:
        """Query heads that share a kv head; 1 as long as there is no model."""
        bound = self.fingerprint or {}
        num_heads, num_kv_heads = (
            bound.get(name) for name in ("num_attention_heads", "num_key_value_heads")
        )
        return num_heads // num_kv_heads if num_heads and num_kv_heads else 1

    def check(self, config: Any) -> None:
        """Binds to a model's configuration, or compares with the one bound to. Raises ValueError:
        lists the fields that differ."""
        given = config_fingerprint(config)
        with self._lock:
            if self.fingerprint is None:
                self.fingerprint = {**given, "weights": None}
            bound = self.fingerprint
        differing = [name for name in given if given[name] != bound[name]]
        if differing:
            fields = ", ".join(f"{name} {given[name]!r} for {bound[name]!r}" for name in differing)
            raise ValueError(
                f"this database holds contexts of another model: {fields}; use one DB per model"
            )

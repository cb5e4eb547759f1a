# SPDX-License-Identifier: Apache-2.0
"""What a stored context was computed from: the model, and the tokens."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from vllm_relay.sparse.contexts.tokens import as_tokens
from vllm_relay.sparse.files.section_table import check_json
from vllm_relay.sparse.index.elements import DTYPES

CONTEXT_FORMAT = 3
CHAIN_TOKENS = 16
CHAIN_HASH_BYTES = 16


class ForeignContextError(ValueError):
    """The context is whole, but was computed by another model or in another way."""


@dataclass(frozen=True)
class ContextFingerprint:
    """What keys and values depend on besides the tokens.

    Attributes:
        model: its name, for people.
        model_hash: of its weights; "" where nobody computed one.
        num_layers, num_kv_heads, head_size: of the whole model.
        dtype: of keys and values: "float32", "float16" or "bfloat16".
        rope: the parameters of the rotary position embedding, as JSON can hold them.
        context_format: the layout of the file.

    Raises:
        ValueError: a field is unusable; names it.
    """

    model: str
    model_hash: str
    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: str
    rope: dict[str, Any] = field(default_factory=dict)
    context_format: int = CONTEXT_FORMAT

    def __post_init__(self) -> None:
        for name in ("model", "model_hash"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected a text")
        for name in ("num_layers", "num_kv_heads", "head_size", "context_format"):
            value = getattr(self, name)
            if type(value) is not int or not 0 < value < 2**31:
                raise ValueError(f"{name} is {value!r}, expected a whole number >= 1")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}, expected one of {', '.join(DTYPES)}")
        if not isinstance(self.rope, dict):
            raise ValueError(f"rope is {self.rope!r}, expected a dict")
        check_json("rope", self.rope)

    def canonical(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    def differences(self, expected: ContextFingerprint) -> list[str]:
        """One line for each field that differs."""
        found, wanted = json.loads(self.canonical()), json.loads(expected.canonical())
        return [
            f"{name} is {found[name]!r}, expected {wanted[name]!r}"
            for name in found
            if found[name] != wanted[name]
        ]


def token_chain(tokens: Any, fingerprint: ContextFingerprint) -> np.ndarray:
    """uint8 [n // 16, 16]: hash i is that of the fingerprint and the first 16 * (i + 1) tokens, so
    that equal hashes mean equal keys and values up to there."""
    token_ids = as_tokens("tokens", tokens).astype("<i4")
    link = hashlib.blake2b(fingerprint.canonical().encode(), digest_size=CHAIN_HASH_BYTES).digest()
    links = []
    for begin in range(0, len(token_ids) - CHAIN_TOKENS + 1, CHAIN_TOKENS):
        block = token_ids[begin : begin + CHAIN_TOKENS].tobytes()
        link = hashlib.blake2b(link + block, digest_size=CHAIN_HASH_BYTES).digest()
        links.append(link)
    return np.frombuffer(b"".join(links), np.uint8).reshape(-1, CHAIN_HASH_BYTES)

# SPDX-License-Identifier: Apache-2.0
"""What the RELAY backend says of itself, and what its layers do, on every device."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionLayer,
    AttentionMetadataBuilder,
    AttentionType,
)

from vllm_relay.limits import (
    BACKEND_NAME,
    DTYPES,
    FP8_KV_CACHE_DTYPES,
    HEAD_SIZES,
    RelayUnsupportedError,
    attn_type_reason,
)

QueryKeyValue = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Of the tokens of a step: [tokens, heads, head_size], may be padded. `do_kv_cache_update` has
stored keys and values; both are None in layers that read another layer's cache."""


class NamedBackend(AttentionBackend):
    """A backend that says what it is called and consists of."""

    name: ClassVar[str] = BACKEND_NAME
    impl_cls: ClassVar[type[AttentionImpl]]
    builder_cls: ClassVar[type[AttentionMetadataBuilder]]

    @classmethod
    def get_name(cls) -> str:
        return cls.name

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        return cls.impl_cls

    @classmethod
    def get_builder_cls(cls) -> type[AttentionMetadataBuilder]:
        return cls.builder_cls


class RelayBackendBase(NamedBackend):
    """Exact attention that reads KV blocks shared by several requests once for all of them."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [getattr(torch, name) for name in DTYPES]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", *FP8_KV_CACHE_DTYPES]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(HEAD_SIZES)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """A token's bits do not depend on how its request is cut into steps, nor on others."""
        return True


def typed(kv_cache: torch.Tensor) -> torch.Tensor:
    """vLLM allocates fp8 caches as bytes."""
    return kv_cache.view(torch.float8_e4m3fn) if kv_cache.dtype == torch.uint8 else kv_cache


def check_output(*scales: Any) -> None:
    """Check that a layer's output is not to be quantized.

    Raises:
        NotImplementedError: a scale is given.
    """
    if any(scale is not None for scale in scales):
        raise NotImplementedError("relay cannot quantize its output: disable output fusion")


class RelayImplBase(AttentionImpl[Any]):
    """Attention of one layer.

    Raises:
        RelayUnsupportedError: not a causal decoder layer.
        ValueError: not one sink for each query head.
    """

    device_type: ClassVar[str]

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if reason := attn_type_reason(attn_type, self.device_type):
            raise RelayUnsupportedError([reason])
        if sinks is not None and sinks.shape != (num_heads,):
            raise ValueError(f"sinks have shape {tuple(sinks.shape)}, expected [{num_heads}]")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.alibi_slopes = (
            None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        )
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.logits_soft_cap = logits_soft_cap or None
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks

    @abstractmethod
    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Store the step's keys and values, before ``forward`` reads any of them.

        Args:
            layer: holds the scales of an fp8 cache.
            key, value: [tokens, num_kv_heads, head_size], may be padded.
            kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_size].
            slot_mapping: int64 [tokens], -1 for padding.
        """

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *scales: Any,
        **named_scales: Any,
    ) -> torch.Tensor:
        """Write the attention of ``query`` over ``kv_cache`` into ``output``.

        Args:
            layer: holds the scales of an fp8 cache.
            query, key, value: `QueryKeyValue`.
            kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_size].
            attn_metadata: None in profiling runs, whose output is zero.
            output: [tokens, num_heads, head_size]; rows of padding stay as they are.
            scales, named_scales: must be None, output is never quantized.
        """
        check_output(*scales, *named_scales.values())
        if attn_metadata is None:
            return output.fill_(0)
        self._attend(layer, (query, key, value), kv_cache, attn_metadata, output)
        return output

    @abstractmethod
    def _attend(
        self,
        layer: AttentionLayer,
        given: QueryKeyValue,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """As ``forward``; writes float32 [tokens, num_heads] to ``lse`` if it is given."""

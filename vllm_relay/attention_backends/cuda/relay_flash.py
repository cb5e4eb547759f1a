# SPDX-License-Identifier: Apache-2.0
"""The RELAY backend on CUDA with prompts by FlashAttention."""

from __future__ import annotations

from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from vllm_relay.attention_backends.cuda.relay import (
    RelayCudaBackend,
    RelayCudaImpl,
    RelayCudaMetadataBuilder,
)


class RelayFlashMetadataBuilder(RelayCudaMetadataBuilder):
    stock_builder_cls = FlashAttentionMetadataBuilder


class RelayFlashImpl(RelayCudaImpl):
    stock_impl_cls = FlashAttentionImpl


class RelayFlashBackend(RelayCudaBackend):
    stock = FlashAttentionBackend

    @staticmethod
    def get_impl_cls() -> type[RelayFlashImpl]:
        return RelayFlashImpl

    @staticmethod
    def get_builder_cls() -> type[RelayFlashMetadataBuilder]:
        return RelayFlashMetadataBuilder

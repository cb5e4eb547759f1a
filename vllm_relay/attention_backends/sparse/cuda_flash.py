# SPDX-License-Identifier: Apache-2.0
"""The RELAY_SPARSE backend on CUDA with prompts by FlashAttention."""

from __future__ import annotations

from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from vllm_relay.attention_backends.sparse.cuda import (
    RelaySparseCudaBackend,
    RelaySparseCudaImpl,
    RelaySparseCudaMetadataBuilder,
)


class RelaySparseFlashMetadataBuilder(RelaySparseCudaMetadataBuilder):
    stock_builder_cls = FlashAttentionMetadataBuilder


class RelaySparseFlashImpl(RelaySparseCudaImpl):
    stock_impl_cls = FlashAttentionImpl


class RelaySparseFlashBackend(RelaySparseCudaBackend):
    stock = FlashAttentionBackend

    @staticmethod
    def get_impl_cls() -> type[RelaySparseFlashImpl]:
        return RelaySparseFlashImpl

    @staticmethod
    def get_builder_cls() -> type[RelaySparseFlashMetadataBuilder]:
        return RelaySparseFlashMetadataBuilder

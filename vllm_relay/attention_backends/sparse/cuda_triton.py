# SPDX-License-Identifier: Apache-2.0
"""The RELAY_SPARSE backend on CUDA with prompts by vLLM's Triton attention."""

from __future__ import annotations

from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from vllm_relay.attention_backends.sparse.cuda import (
    RelaySparseCudaBackend,
    RelaySparseCudaImpl,
    RelaySparseCudaMetadataBuilder,
)


class RelaySparseTritonMetadataBuilder(RelaySparseCudaMetadataBuilder):
    stock_builder_cls = TritonAttentionMetadataBuilder


class RelaySparseTritonImpl(RelaySparseCudaImpl):
    stock_impl_cls = TritonAttentionImpl


class RelaySparseTritonBackend(RelaySparseCudaBackend):
    stock = TritonAttentionBackend

    @staticmethod
    def get_impl_cls() -> type[RelaySparseTritonImpl]:
        return RelaySparseTritonImpl

    @staticmethod
    def get_builder_cls() -> type[RelaySparseTritonMetadataBuilder]:
        return RelaySparseTritonMetadataBuilder

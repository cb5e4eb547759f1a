# SPDX-License-Identifier: Apache-2.0
"""The RELAY backend on CUDA with prompts by vLLM's Triton attention."""

from __future__ import annotations

from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from vllm_relay.attention_backends.cuda.relay import (
    RelayCudaBackend,
    RelayCudaImpl,
    RelayCudaMetadataBuilder,
)


class RelayTritonMetadataBuilder(RelayCudaMetadataBuilder):
    stock_builder_cls = TritonAttentionMetadataBuilder


class RelayTritonImpl(RelayCudaImpl):
    stock_impl_cls = TritonAttentionImpl


class RelayTritonBackend(RelayCudaBackend):
    stock = TritonAttentionBackend

    @staticmethod
    def get_impl_cls() -> type[RelayTritonImpl]:
        return RelayTritonImpl

    @staticmethod
    def get_builder_cls() -> type[RelayTritonMetadataBuilder]:
        return RelayTritonMetadataBuilder

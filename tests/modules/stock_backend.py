# SPDX-License-Identifier: Apache-2.0
"""The RELAY backend for CUDA with prompts by the reference, where they hide nothing."""

from __future__ import annotations

from tests.attention_backends.stock_cuda import StockBuilder, StockImpl
from vllm_relay.attention_backends.cuda.relay import (
    RelayCudaBackend,
    RelayCudaImpl,
    RelayCudaMetadataBuilder,
)


class StockedBuilder(RelayCudaMetadataBuilder):
    stock_builder_cls = StockBuilder


class StockedImpl(RelayCudaImpl):
    stock_impl_cls = StockImpl


class StockedBackend(RelayCudaBackend):
    impl_cls = StockedImpl
    builder_cls = StockedBuilder

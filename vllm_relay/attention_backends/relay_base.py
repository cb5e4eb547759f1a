# SPDX-License-Identifier: Apache-2.0
"""What the RELAY backend says of itself on every device."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend

from vllm_relay.limits import BACKEND_NAME, DTYPES, HEAD_SIZES


class RelayBackendBase(AttentionBackend):
    """Exact attention that reads KV blocks shared by several requests once for all of them."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [getattr(torch, name) for name in DTYPES]

    @staticmethod
    def get_name() -> str:
        return BACKEND_NAME

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(HEAD_SIZES)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True


def check_output(*scales: Any) -> None:
    """Check that a layer's output is not to be quantized.

    Raises:
        NotImplementedError: a scale is given.
    """
    if any(scale is not None for scale in scales):
        raise NotImplementedError("relay cannot quantize its output: disable output fusion")

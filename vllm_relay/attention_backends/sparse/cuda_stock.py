# SPDX-License-Identifier: Apache-2.0
"""RELAY_SPARSE on CUDA beside each of vLLM's backends that prompts may be left to."""

from __future__ import annotations

from typing import Any

from vllm_relay.attention_backends.cuda.relay_stock import backend_beside
from vllm_relay.attention_backends.sparse.cuda import RelaySparseCudaBackend


def __getattr__(name: str) -> Any:
    return backend_beside(name, RelaySparseCudaBackend)

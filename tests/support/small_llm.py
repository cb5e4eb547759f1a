# SPDX-License-Identifier: Apache-2.0
"""Engines that start quickly and count exactly, for tests of what is built on `LLM`."""

from __future__ import annotations

from typing import Any

from vllm import LLM


def small_llm(model: str, *, num_gpu_blocks_override: int = 200, **arguments: Any) -> LLM:
    """In float32 and blocks of 32 tokens, with metrics; `arguments` are others of `LLM`."""
    return LLM(
        model,
        block_size=32,
        disable_log_stats=False,
        dtype="float32",
        enforce_eager=True,
        num_gpu_blocks_override=num_gpu_blocks_override,
        **arguments,
    )


def small_relay_llm(model: str, **arguments: Any) -> LLM:
    """Like `small_llm`, with relay's backend and scheduler."""
    relay = {"relay": {"scheduler": True}}
    return small_llm(model, additional_config=relay, attention_backend="relay", **arguments)

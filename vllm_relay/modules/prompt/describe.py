# SPDX-License-Identifier: Apache-2.0
"""What a schema takes: positions, tokens, blocks, padding."""

from __future__ import annotations

from typing import Any

from vllm_relay.modules.prompt.layout import ModuleTokens, SchemaTokens


def describe_schema(schema: SchemaTokens, block_size: int) -> dict[str, Any]:
    """For JSON: name, positions, and each module's path ("" for what every prompt has), first
    position, positions, tokens of its own text, whether they are stored, the KV blocks and padding
    tokens this takes, and parameters.

    Args:
        block_size: tokens of a KV block.
    """
    return {
        "name": schema.schema.name,
        "positions": schema.size_tokens,
        "block_size": block_size,
        "modules": [_describe(module, block_size) for module in schema.root.walk()],
    }


def _describe(module: ModuleTokens, block_size: int) -> dict[str, Any]:
    stored = len(module.tokens) if module.is_cached else 0
    blocks = -(-stored // block_size)
    return {
        "module": module.name,
        "position": module.position,
        "positions": module.size_tokens,
        "tokens": len(module.tokens),
        "cached": module.is_cached,
        "blocks": blocks,
        "padding_tokens": blocks * block_size - stored,
        "parameters": {each.name: each.length_tokens for each in module.parameters()},
    }

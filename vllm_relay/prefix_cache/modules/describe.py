# SPDX-License-Identifier: Apache-2.0
"""What a schema takes: positions, tokens, blocks, padding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm_relay.prefix_cache.modules.layout import (
    ModuleTokens,
    ParameterTokens,
    SchemaTokens,
    UnionTokens,
)


def describe_schema(schema: SchemaTokens, block_size: int) -> dict[str, Any]:
    """For JSON: name, positions, and each module's path ("" for what every prompt has), first
    position, positions, stored tokens, KV blocks, padding in tokens and parameters."""
    return {
        "name": schema.schema.name,
        "positions": schema.size_tokens,
        "block_size": block_size,
        "modules": [_describe(module, block_size) for module in modules_of(schema.root)],
    }


def modules_of(module: ModuleTokens) -> Iterator[ModuleTokens]:
    """A module and all modules in it, in the order of the text."""
    yield module
    for part in module.parts:
        members = part.members if isinstance(part, UnionTokens) else (part,)
        for member in members:
            if isinstance(member, ModuleTokens):
                yield from modules_of(member)


def _describe(module: ModuleTokens, block_size: int) -> dict[str, Any]:
    stored = len(module.tokens) if module.is_cached else 0
    blocks = -(-stored // block_size)
    parameters = [part.parameter for part in module.parts if isinstance(part, ParameterTokens)]
    return {
        "module": module.name,
        "position": module.position,
        "positions": module.size_tokens,
        "tokens": len(module.tokens),
        "cached": module.is_cached,
        "blocks": blocks,
        "padding_tokens": blocks * block_size - stored,
        "parameters": {each.name: each.length_tokens for each in parameters},
    }

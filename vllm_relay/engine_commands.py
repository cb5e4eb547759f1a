# SPDX-License-Identifier: Apache-2.0
"""How front ends reach the command that plug-ins give vLLM's engine core."""

from __future__ import annotations

from typing import Any


def call(engine: Any, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """What the command of this name answers in the engine core of an LLMEngine."""
    from vllm.v1.engine.core_client import InprocClient

    client = engine.engine_core
    if isinstance(client, InprocClient):
        return client.engine_core.relay_command(name, arguments)
    return client.call_utility("relay_command", name, arguments)


async def call_async(engine: Any, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """:func:`call` for an AsyncLLM."""
    return await engine.engine_core.call_utility_async("relay_command", name, arguments)

# SPDX-License-Identifier: Apache-2.0
"""What stays in the prefix cache, and what a cache of a given size is worth.

chains.py            names of blocks that tell all before them                     (pure)
eviction/            which free block leaves first
pins/                prompts that never leave                                      (vLLM)
stats.py             counters of the prefix cache, and the prefixes used most
predict/             hits and waits before spending: vLLM's engine core, a stub for the model
modules.py           the first name of `vllm_relay.modules`
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_relay.commands.errors import CommandError as PinError
    from vllm_relay.prefix_cache.pins.client import Pin, list_pins, pin, top_prefixes, unpin

__all__ = ["Pin", "PinError", "list_pins", "pin", "top_prefixes", "unpin"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "PinError":
        from vllm_relay.commands.errors import CommandError

        return CommandError
    from vllm_relay.prefix_cache.pins import client

    return getattr(client, name)

# SPDX-License-Identifier: Apache-2.0
"""What stays in the prefix cache, and what a cache of a given size is worth."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_relay.commands.errors import CommandError as PinError
    from vllm_relay.prefix_cache.pin_client import Pin, list_pins, pin, top_prefixes, unpin

__all__ = ["Pin", "PinError", "list_pins", "pin", "top_prefixes", "unpin"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "PinError":
        from vllm_relay.commands.errors import CommandError

        return CommandError
    from vllm_relay.prefix_cache import pin_client

    return getattr(pin_client, name)

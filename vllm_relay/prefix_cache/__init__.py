# SPDX-License-Identifier: Apache-2.0
"""What stays in the prefix cache, and what a cache of a given size is worth.

eviction/            which free block leaves first
pins.py              prompts that never leave; lives in the engine core            (vLLM)
commands.py, pin_client.py   pins from front ends
system_prompts.py    pins the configured prompts when an engine starts
stats.py             counters of the prefix cache, and the prefixes used most
predict.py, predict_executor.py, predict_input.py, predict_report.py, predict_run.py
                     vLLM's engine core with a stub for the model: hits before spending (vLLM)
modules.py           the first name of `vllm_relay.modules`
"""

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

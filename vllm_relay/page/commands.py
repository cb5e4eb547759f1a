# SPDX-License-Identifier: Apache-2.0
"""What front ends can ask the engine core about its prefix forest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_relay.commands.errors import CommandError
from vllm_relay.page.feed import Feed

HOW_TO_SELECT = "start vLLM with --additional-config.relay.page true"


def _feed(engine_core: Any) -> Feed:
    found = getattr(engine_core.scheduler, "relay_page", None)
    if found is None:
        raise CommandError(404, f"this engine records no prefix forest: {HOW_TO_SELECT}")
    return found


COMMANDS: dict[str, Callable[..., Any]] = {
    "watch_forest": lambda core, **asked: _feed(core).poll(**asked),
    "prefix_tokens": lambda core, **asked: _feed(core).prefix(**asked),
    "evict_prefix": lambda core, **asked: _feed(core).evict(**asked),
}

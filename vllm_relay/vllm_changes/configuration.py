# SPDX-License-Identifier: Apache-2.0
"""What configurations do not tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_relay.vllm_changes.wrap import wrap


def mark_offline_engines() -> None:
    """Make ``is_offline`` true for the configurations of ``LLM``.

    Reason: the order of requests is free only where all are there from the beginning, and neither
    the configuration nor the engine core knows whether LLM or a server is in front of it.
    Remove when: VllmConfig tells its usage context.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def create_engine_config(
            self: Any, usage_context: Any = None, *args: Any, **kwargs: Any
        ) -> Any:
            vllm_config = original(self, usage_context, *args, **kwargs)
            if usage_context == UsageContext.LLM_CLASS:
                vllm_config.scheduler_config.relay_is_offline = True
            return vllm_config

        return create_engine_config

    wrap(EngineArgs, "create_engine_config", make)


def is_offline(vllm_config: Any) -> bool:
    """Whether the engine of this configuration belongs to an ``LLM``."""
    return getattr(vllm_config.scheduler_config, "relay_is_offline", False)

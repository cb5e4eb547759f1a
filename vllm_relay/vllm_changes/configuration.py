# SPDX-License-Identifier: Apache-2.0
"""What configurations do not tell, and how they are refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from vllm_relay.vllm_changes.platform import RefusedError
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


def tell_refusals_alone() -> None:
    """Let those who make engines get a RefusedError as it is, and a server that ends by one print
    its message alone.

    Reason: pydantic puts it into an error with all that the configuration was given, under which
    `vllm serve` prints a page of traceback.
    Remove when: vLLM tells why it refuses a configuration by the message alone.
    """
    from pydantic import ValidationError
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def create_engine_config(
            self: Any, usage_context: Any = None, *args: Any, **kwargs: Any
        ) -> Any:
            try:
                return original(self, usage_context, *args, **kwargs)
            except ValidationError as error:
                reasons = [each.get("ctx", {}).get("error") for each in error.errors()]
                refused = [each for each in reasons if isinstance(each, RefusedError)]
                if not refused:
                    raise
            if usage_context == UsageContext.OPENAI_API_SERVER:
                _print_alone()
            raise RefusedError(str(refused[0]))

        return create_engine_config

    wrap(EngineArgs, "create_engine_config", make, mark="_refusals_are_told_alone")


def _print_alone() -> None:
    """RefusedErrors that nobody catches, without their traceback."""
    others = sys.excepthook

    def print_error(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        if isinstance(error, RefusedError):
            print(f"vllm-relay: {error}", file=sys.stderr)
        else:
            others(kind, error, traceback)

    sys.excepthook = print_error

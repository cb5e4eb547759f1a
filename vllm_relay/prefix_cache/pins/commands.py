# SPDX-License-Identifier: Apache-2.0
"""What a front end can ask the engine core about pins and prefixes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm_relay.commands.errors import CommandError
from vllm_relay.modules.prompt.plan import ModulePlan
from vllm_relay.prefix_cache.stats import TOP_PREFIXES, PrefixCacheRecorder

if TYPE_CHECKING:
    from vllm_relay.prefix_cache.pins.table import PinTable

HOW_TO_SELECT = "start vLLM with --additional-config.relay.scheduler true"


def _declare(
    engine_core: Any, pin_id: str, token_ids: Sequence[int], plan: str | None = None, **whose: Any
) -> dict[str, Any]:
    read = None if plan is None else ModulePlan.of_argument(plan)
    return _pins(engine_core).declare(pin_id, token_ids, read, **whose)


def _gauges(engine_core: Any) -> dict[str, int]:
    _pins(engine_core).expire()
    return _recorder(engine_core).gauges()


def _top_prefixes(engine_core: Any, count: int = TOP_PREFIXES) -> list[dict[str, Any]]:
    return _recorder(engine_core).top_prefixes.top(count)


COMMANDS: dict[str, Callable[..., Any]] = {
    "declare_pin": _declare,
    "settle_pin": lambda engine_core, **which: _pins(engine_core).settle(**which),
    "unpin": lambda engine_core, **which: _pins(engine_core).unpin(**which),
    "pins": lambda engine_core: _pins(engine_core).entries(),
    "gauges": _gauges,
    "top_prefixes": _top_prefixes,
}


def _pins(engine_core: Any) -> PinTable:
    return _of_scheduler(engine_core, "pins", "prompts are pinned")


def _recorder(engine_core: Any) -> PrefixCacheRecorder:
    return _of_scheduler(engine_core, "relay_recorder", "prefixes are counted")


def _of_scheduler(engine_core: Any, name: str, what: str) -> Any:
    found = getattr(engine_core.scheduler, name, None)
    if found is None:
        raise CommandError(501, f"{what} by RelayScheduler only: {HOW_TO_SELECT}")
    return found

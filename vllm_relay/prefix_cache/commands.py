# SPDX-License-Identifier: Apache-2.0
"""What a front end can ask the engine core: arguments and results are of plain types."""

from __future__ import annotations

from typing import Any

from vllm_relay.modules.plan import ModulePlan
from vllm_relay.prefix_cache.pins import PinError
from vllm_relay.prefix_cache.stats import TOP_PREFIXES


def run(scheduler: Any, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Run a command in the engine core.

    Returns:
        ``{"result": ...}``, or ``{"error": {"status": ..., "message": ...}}`` for a PinError.
    """
    try:
        return {"result": _run(scheduler, name, arguments)}
    except PinError as error:
        return {"error": {"status": error.status, "message": str(error)}}


def result_of(answer: dict[str, Any]) -> Any:
    """The result in what :func:`run` returned.

    Raises:
        PinError: the one the command raised.
    """
    if "error" in answer:
        raise PinError(**answer["error"])
    return answer["result"]


def _run(scheduler: Any, name: str, arguments: dict[str, Any]) -> Any:
    if name == "top_prefixes":
        recorder = getattr(scheduler, "relay_recorder", None)
        if recorder is None:
            raise PinError(501, "prefixes are counted by RelayScheduler only: " + HOW_TO_SELECT)
        return recorder.top_prefixes.top(arguments.get("count", TOP_PREFIXES))
    pins = getattr(scheduler, "pins", None)
    if pins is None:
        raise PinError(501, "prompts are pinned by RelayScheduler only: " + HOW_TO_SELECT)
    if name == "declare_pin":
        plan = arguments.get("plan")
        return pins.declare(
            arguments["pin_id"],
            arguments["token_ids"],
            None if plan is None else ModulePlan.model_validate(plan),
        )
    if name == "unpin":
        return pins.unpin(arguments["pin_id"])
    if name == "pin":
        return pins.get(arguments["pin_id"])
    if name == "pins":
        return pins.entries()
    if name == "size":
        return {"blocks": pins.num_blocks, "bytes": pins.num_bytes}
    raise ValueError(f"command {name!r} was given, which this version of vllm-relay does not know")


HOW_TO_SELECT = "start vLLM with --additional-config.relay.scheduler true"

# SPDX-License-Identifier: Apache-2.0
"""Requests of vLLM's engine core and their plans."""

from __future__ import annotations

from typing import Any

from vllm_relay.prefix_cache.modules.plan import ModulePlan, plan_of

_ATTRIBUTE = "relay_plan"


def plan_of_request(request: Any) -> ModulePlan | None:
    """Of a request of the engine core, or of what a worker keeps of one; read once."""
    try:
        return getattr(request, _ATTRIBUTE)
    except AttributeError:
        plan = plan_of(request.sampling_params)
        setattr(request, _ATTRIBUTE, plan)
        return plan

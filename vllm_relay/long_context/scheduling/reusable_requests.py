# SPDX-License-Identifier: Apache-2.0
"""Which requests may reuse stored contexts, and which become one."""

from __future__ import annotations

from vllm.v1.request import Request, RequestStatus

from vllm_relay.long_context.orders import asks_to_be_kept

_FINISHED = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


def is_known_by_tokens(request: Request) -> bool:
    """Whether equal tokens mean equal keys and values."""
    return (
        request.lora_request is None
        and not request.cache_salt
        and not request.mm_features
        and request.prompt_embeds is None
    )


def is_kept(request: Request) -> bool:
    """Whether a request that has ended asked to become a context, and was not aborted."""
    return (
        asks_to_be_kept(request.sampling_params)
        and is_known_by_tokens(request)
        and request.status in _FINISHED
    )

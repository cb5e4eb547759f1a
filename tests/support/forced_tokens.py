# SPDX-License-Identifier: Apache-2.0
"""Requests that generate given tokens: log-probabilities of engines at the same text.

Log-probabilities are those of the model, from before a token is forced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor

_ARGUMENT = "forced_token_ids"


class ForcedTokens(AdapterLogitsProcessor):
    """For `logits_processors` of an engine that answers requests with `forced`."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        token_ids = (params.extra_args or {}).get(_ARGUMENT)
        if token_ids is None:
            return None

        def force(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            forced = torch.full_like(logits, -torch.inf)
            forced[token_ids[len(output_ids)]] = 0
            return forced

        return force


def forced(token_ids: Sequence[int], logprobs: int, **arguments: Any) -> SamplingParams:
    """Generates these tokens; `logprobs` are told of the best of each position, and its own."""
    return SamplingParams(
        temperature=0,
        max_tokens=len(token_ids),
        ignore_eos=True,
        detokenize=False,
        logprobs=logprobs,
        extra_args={_ARGUMENT: list(token_ids)},
        **arguments,
    )

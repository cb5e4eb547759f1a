# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.request import Request, RequestStatus

from vllm_relay.long_context.scheduling.kept_contexts import is_kept, is_known_by_tokens


def request_with(keep: Any = True, **other: Any) -> Request:
    arguments: dict[str, Any] = {"prompt_token_ids": [1, 2, 3], "pooling_params": None} | other
    params = SamplingParams(max_tokens=2, extra_args={"relay_keep_context": keep})
    request = Request("request", sampling_params=params, **arguments)
    request.status = RequestStatus.FINISHED_STOPPED
    return request


@pytest.mark.parametrize("keep", [True, 1, 1.0])
def test_a_request_that_asks_is_kept(keep: Any) -> None:
    assert is_kept(request_with(keep))


@pytest.mark.parametrize("keep", [False, 0, None, 2, "no", "1", [1]])
def test_other_values_mean_nothing(keep: Any) -> None:
    assert not is_kept(request_with(keep))


@pytest.mark.parametrize("status", ["RUNNING", "FINISHED_ABORTED", "FINISHED_ERROR"])
def test_what_did_not_end_well_is_not_kept(status: str) -> None:
    request = request_with()
    request.status = RequestStatus[status]
    assert not is_kept(request)


def test_prompts_that_are_more_than_their_tokens_are_not_reused() -> None:
    embeddings = torch.randn(3, 8)
    for request in (
        request_with(prompt_token_ids=None, prompt_embeds=embeddings),
        request_with(prompt_embeds=embeddings, prompt_is_token_ids=[True, False, True]),
        request_with(cache_salt="tenant"),
    ):
        assert not is_known_by_tokens(request)
        assert not is_kept(request)

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.modules.engine.test_worker import PLAN
from vllm_relay.modules.engine import requests
from vllm_relay.modules.prompt.plan import EXTRA_ARG


def request(**changes: Any) -> Any:
    params = SimpleNamespace(
        extra_args={EXTRA_ARG: PLAN.to_argument()},
        max_tokens=1,
        prompt_logprobs=None,
        skip_reading_prefix_cache=False,
    )
    given = {
        "sampling_params": params,
        "mm_features": None,
        "prompt_embeds": None,
        "resumable": False,
        "prompt_token_ids": [1] * PLAN.num_prompt_slots,
    }
    return SimpleNamespace(**(given | changes))


@pytest.mark.parametrize(
    "changes",
    [{"mm_features": [object()]}, {"prompt_embeds": object()}, {"resumable": True}],
    ids=["image", "embeddings", "session"],
)
def test_prompts_are_text(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    monkeypatch.setattr(requests, "unsupported_reason", lambda vllm_config: None)
    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=PLAN.block_size),
        model_config=SimpleNamespace(max_model_len=512),
    )
    requests.check_request(config, request())
    with pytest.raises(ValueError, match="prompts are text, whole and of tokens"):
        requests.check_request(config, request(**changes))

# SPDX-License-Identifier: Apache-2.0
"""RELAY and RelayScheduler with images, whose hashes are part of the names of blocks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.runs import Run, assert_same_completions
from tests.integration.tiny_models import IMAGE_TOKENS

pytestmark = pytest.mark.integration

ARGS = {"model": "images", "driver": "multimodal_main"}
SHARED_TOKENS = (IMAGE_TOKENS + 70) // 32 * 32  # full blocks of an image and the common text


@pytest.fixture(scope="module")
def relay(run: Run) -> dict[str, Any]:
    scenarios = ("images", "pinned_text", "reset")
    config = {"relay": {"scheduler": True}}
    return run("relay", scenarios=scenarios, additional_config=config, **ARGS)


def test_answers_are_those_of_vllm(run: Run, relay: dict[str, Any]) -> None:
    stock = run("cpu_attn", scenarios=("images",), **ARGS)
    assert_same_completions(relay["images"], stock["images"])
    assert relay["reset"] is True


def test_only_requests_with_the_same_image_share(relay: dict[str, Any]) -> None:
    first_round = relay["images"][: len(relay["images"]) // 2]
    for number in range(2):
        cached_tokens = sorted(each["cached_tokens"] for each in first_round[number::2])
        assert cached_tokens == [0, SHARED_TOKENS, SHARED_TOKENS]
    assert first_round[0]["token_ids"] != first_round[1]["token_ids"]
    metrics = relay["metrics"]
    assert 0 < metrics["relay:kv_tokens_read"] < metrics["relay:kv_tokens_logical"]


def test_a_pinned_text_is_not_taken_for_an_image(relay: dict[str, Any]) -> None:
    assert relay["pinned_text"] == {"resident": True, "cached_tokens": 0}


def test_long_contexts(run: Run) -> None:
    config = {
        "relay": {"min_context_tokens": 96, "sink_tokens": 20, "window_tokens": 40, "alpha": 0}
    }
    sparse = run("relay_sparse", scenarios=("images", "reset"), additional_config=config, **ARGS)
    stock = run("cpu_attn", scenarios=("images",), **ARGS)
    assert_same_completions(sparse["images"], stock["images"])
    assert sparse["metrics"]["relay:host_seconds"] > 0
    assert sparse["reset"] is True

# SPDX-License-Identifier: Apache-2.0
"""The predictor on vLLM's engine core with a stub for its model."""

from __future__ import annotations

import random

import pytest

from tests.integration.tiny_models import save_model
from vllm_relay.prefix_cache.predict.engine import CacheSize, PredictorSettings
from vllm_relay.prefix_cache.predict.input import PredictedRequest
from vllm_relay.prefix_cache.predict.predictor import Prediction, Predictor, ceiling_tokens
from vllm_relay.prefix_cache.predict.requests import EngineRequests

BLOCK_TOKENS = 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model("llama", tmp_path_factory.mktemp("llama")))


def predict(
    model: str,
    prompts: list[list[int]],
    *,
    blocks: int = 60,
    output_tokens: int = 4,
    eviction: str | None = None,
) -> Prediction:
    settings = PredictorSettings(
        model, eviction=eviction, block_size=BLOCK_TOKENS, max_num_seqs=1, dtype="float32"
    )
    requests = [PredictedRequest(i, p, output_tokens) for i, p in enumerate(prompts, start=1)]
    return Predictor(settings, requests).predict(CacheSize(blocks=blocks))


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(3, 512), k=count)


def test_known_hits(model: str) -> None:
    prefix = tokens(1, 100)
    prompts = [prefix, prefix + tokens(2, 60), prefix[:96], prefix[:96] + [5], tokens(3, 64)]
    prediction = predict(model, prompts)
    # the last block of a prompt is computed again if it is full: its last token must be
    assert prediction.cached_tokens_by_request == [0, 96, 64, 96, 0]
    # had the third begun before the first, the first would have found its last block
    assert prediction.ceiling_tokens == prediction.belady_tokens == prediction.cached_tokens + 32
    assert prediction.prompt_tokens == sum(map(len, prompts))
    assert prediction.hit_rate == prediction.cached_tokens / prediction.prompt_tokens
    assert (prediction.evicted_blocks, prediction.preemptions) == (0, 0)
    assert (prediction.num_blocks, prediction.block_size_tokens) == (60, BLOCK_TOKENS)
    assert prediction.steps == 4 * len(prompts)


@pytest.mark.parametrize("eviction", [None, "queue"])
def test_prompts_share_blocks_with_those_of_their_salt_only(
    model: str, eviction: str | None
) -> None:
    salts = [None, "a", "b", "a", None, "b", "c"]
    prompt = tokens(1, 97)
    requests = [PredictedRequest(i, prompt, 4, salt) for i, salt in enumerate(salts, start=1)]
    settings = PredictorSettings(
        model, eviction=eviction, block_size=BLOCK_TOKENS, max_num_seqs=1, dtype="float32"
    )
    prediction = Predictor(settings, requests).predict(CacheSize(blocks=60))
    assert sorted(prediction.cached_tokens_by_request) == [0, 0, 0, 0, 96, 96, 96]
    assert prediction.ceiling_tokens == prediction.belady_tokens == 3 * 96


def test_equal_prompts_have_equal_answers() -> None:
    """Else their answers would not share blocks after a preemption."""
    prompt = tokens(1, 30)
    requests = [PredictedRequest(i, p, 1) for i, p in enumerate([prompt, [9], prompt])]
    a, b, c = EngineRequests(requests)._generated_token
    assert a == c != b


def test_a_cycle_longer_than_the_cache_is_lost_to_lru(model: str) -> None:
    prompts = [tokens(i, 97) for i in range(12)] * 3
    prediction = predict(model, prompts, blocks=18)
    assert prediction.cached_tokens == 0
    assert prediction.evicted_blocks > 0
    assert prediction.ceiling_tokens == 24 * 96
    assert prediction.belady_tokens is not None
    assert 0 < prediction.belady_tokens < prediction.ceiling_tokens


def test_the_relay_scheduler_is_asked_for(model: str) -> None:
    prompts = [tokens(i, 97) for i in range(12)] * 3
    prediction = predict(model, prompts, blocks=18, eviction="queue")
    assert prediction.cached_tokens == prediction.ceiling_tokens


def test_gib_are_turned_into_blocks_as_vllm_does(model: str) -> None:
    requests = [PredictedRequest(1, tokens(1, 40), 2)]
    settings = PredictorSettings(model, block_size=BLOCK_TOKENS, dtype="float32")
    prediction = Predictor(settings, requests).predict(CacheSize(gib=0.25))
    bytes_per_token = 2 * 2 * 2 * 32 * 4  # layers, K and V, heads, head size, float32
    assert prediction.num_blocks == 2**28 // (bytes_per_token * BLOCK_TOKENS)


def test_defaults_are_those_of_vllm(model: str) -> None:
    prediction = Predictor(PredictorSettings(model), [PredictedRequest(1, [5], 2)]).predict(
        CacheSize(gib=0.25)
    )
    assert prediction.block_size_tokens == 128


def test_progress_ends_with_all_requests(model: str) -> None:
    seen: list[int] = []
    requests = [PredictedRequest(i, [5 + i], 2) for i in range(3)]
    Predictor(PredictorSettings(model), requests).predict(CacheSize(gib=0.25), seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 3


def test_prompts_too_long_are_refused_by_line(model: str) -> None:
    assert predict(model, [tokens(1, 511)], output_tokens=5).steps == 1
    with pytest.raises(
        ValueError, match="line 2: given a prompt of 512 tokens, .* 512 of --max-mod"
    ):
        predict(model, [[5], tokens(1, 512)])


def test_a_cache_too_small_is_refused(model: str) -> None:
    with pytest.raises(
        ValueError, match="KV cache of 9 blocks does not hold one request of 512 tokens"
    ):
        predict(model, [[5]], blocks=9)


@pytest.mark.parametrize(
    ("prompts_tokens", "expected"),
    [
        ([31, 33], 0),  # nothing of the first is a full block
        ([33, 33], 1),
        ([32, 32], 0),  # the only full block holds the last token
        ([32, 33], 1),
        ([33, 32], 1),  # were the second first, the first would find its block
        ([64, 65, 65], 2 + 2),
        ([65, 65, 65, 64], 3 + 3),
    ],
)
def test_ceiling(prompts_tokens: list[int], expected: int) -> None:
    chains = [[b"0", b"1", b"2"][: count // 32] for count in prompts_tokens]
    assert ceiling_tokens(chains, prompts_tokens, 32) == expected * 32


def test_ceiling_without_anything_shared() -> None:
    assert ceiling_tokens([[b"0", b"1"], [b"2"], []], [65, 33, 5], 32) == 0

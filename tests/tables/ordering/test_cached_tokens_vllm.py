# SPDX-License-Identifier: Apache-2.0
"""The counter against vLLM's engine core."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.integration.tiny_models import save_model
from vllm_relay.prefix_cache.predict.engine import CacheSize, PredictorSettings
from vllm_relay.prefix_cache.predict.input import PredictedRequest
from vllm_relay.prefix_cache.predict.predictor import Predictor
from vllm_relay.tables.ordering.cached_tokens import BlockCache, cached_tokens
from vllm_relay.tables.ordering.sequences import TokenSequences


@pytest.mark.parametrize("num_blocks", [18, 25, 60])
def test_vllm_finds_the_same(num_blocks: int, tmp_path: Path) -> None:
    rng = random.Random(num_blocks)
    prefixes = [rng.choices(range(3, 512), k=rng.randrange(20, 200)) for _ in range(6)]
    prompts = [
        rng.choice(prefixes)[: rng.choice([32, 64, 99, 200])]
        + rng.choices(range(3, 512), k=rng.choice([0, 1, 40, 90]))
        for _ in range(120)
    ]
    settings = PredictorSettings(
        str(save_model("llama", tmp_path)), block_size=32, max_num_seqs=1, dtype="float32"
    )
    requests = [PredictedRequest(line, prompt, 1) for line, prompt in enumerate(prompts)]
    expected = Predictor(settings, requests).predict(CacheSize(blocks=num_blocks))
    cache = BlockCache(32, num_blocks - 1)
    found = cached_tokens(TokenSequences.from_lists(prompts), cache)
    assert found.tolist() == expected.cached_tokens_by_request
    assert found.sum() > 0

# SPDX-License-Identifier: Apache-2.0
"""The predictor against `LLM.generate`, request by request."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from tests.integration.tiny_models import save_model
from tests.support.vllm_processes import run_module
from vllm_relay.prefix_cache.predict.engine import CacheSize, PredictorSettings
from vllm_relay.prefix_cache.predict.input import PredictedRequest
from vllm_relay.prefix_cache.predict.predictor import Predictor

pytestmark = pytest.mark.integration

SETTINGS = PredictorSettings(
    "",
    block_size=32,
    max_num_seqs=8,
    max_num_batched_tokens=96,  # prompts are computed in chunks
    dtype="float32",
)
# model, blocks of the KV cache and eviction of the relay scheduler
CASES = [("llama", 20, None), ("llama", 45, None), ("llama", 45, "queue"), ("gemma2", 120, None)]
Engines = list[tuple[PredictorSettings, list[list[int]]]]


def requests() -> list[PredictedRequest]:
    rng = random.Random(1)
    prefixes = [rng.choices(range(3, 512), k=rng.randrange(40, 200)) for _ in range(6)]
    made = []
    for line in range(40):
        tail = rng.choices(range(3, 512), k=rng.randrange(1, 80))
        salt = "a secret" if line % 5 == 0 else None
        prompt = rng.choice(prefixes) + tail
        made.append(PredictedRequest(line, prompt, rng.randrange(1, 40), salt))
    return made + made[:4]  # equal prompts have equal answers


ORDERS = {
    "as made": requests(),
    "sorted": sorted(requests(), key=lambda request: request.prompt_token_ids),
}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """For each case the settings, and the cached tokens of each request in each order."""
    folder = tmp_path_factory.mktemp("engines")
    models = {kind: str(save_model(kind, folder / kind)) for kind in ("llama", "gemma2")}
    settings = [replace(SETTINGS, model=models[kind], eviction=e) for kind, _, e in CASES]
    engine_args = [
        one.engine_args(
            num_gpu_blocks_override=blocks, skip_tokenizer_init=True, enforce_eager=True
        )
        for one, (_, blocks, _) in zip(settings, CASES, strict=True)
    ]
    workloads = [
        [(r.prompt_token_ids, r.output_tokens, r.cache_salt) for r in order]
        for order in ORDERS.values()
    ]
    given, found = folder / "input.json", folder / "output.json"
    given.write_text(json.dumps({"engines": engine_args, "workloads": workloads}))
    done = run_module(
        "tests.prefix_cache.predict.engine_process",
        [str(given), str(found)],
        # one thread: it waits for no other where cores are busy
        {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        },
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return list(zip(settings, json.loads(found.read_text()), strict=True))


@pytest.mark.parametrize(
    "case", range(len(CASES)), ids=lambda case: "-".join(map(str, CASES[case]))
)
def test_cached_tokens_are_those_of_llm_generate(case: int, engines: Engines) -> None:
    _, blocks, _ = CASES[case]
    settings, expected = engines[case]
    for (order, given), cached_tokens in zip(ORDERS.items(), expected, strict=True):
        prediction = Predictor(settings, given).predict(CacheSize(blocks=blocks))
        assert prediction.cached_tokens_by_request == cached_tokens, order
        assert sum(cached_tokens) > 0
        assert prediction.preemptions > 0 or blocks > 20

# SPDX-License-Identifier: Apache-2.0
"""Runs the scenarios of test_multimodal.py on one engine, in a process of its own.

Usage: python -m tests.integration.multimodal_main OUTPUT.json ENGINE_ARGS.json SCENARIO...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from vllm import LLM

from tests.integration.engine_main import ENGINE_ARGS, completion, greedy, tokens
from tests.integration.tiny_models import IMAGE_SIZE, MAX_MODEL_LEN_TOKENS

MULTIMODAL_ARGS = {
    "skip_tokenizer_init": False,
    "max_num_batched_tokens": MAX_MODEL_LEN_TOKENS,
    "limit_mm_per_prompt": {"image": 1},
}
NUM_IMAGES, MEMBERS = 2, 3
TEXT_TOKENS = 70


def image(seed: int) -> Image.Image:
    pixels = np.random.RandomState(seed).randint(0, 255, (IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8)
    return Image.fromarray(pixels)


def run_images(llm: LLM) -> Any:
    """The same texts behind two images, which stand for equal tokens; and twice."""
    prompts = [
        {
            "prompt_token_ids": tokens(1, TEXT_TOKENS) + tokens(20 + member, 5),
            "multi_modal_data": {"image": image(number)},
        }
        for member in range(MEMBERS)
        for number in range(NUM_IMAGES)
    ]
    rounds = [llm.generate(prompts, greedy(12, logprobs=2), use_tqdm=False) for _ in "12"]
    return [
        {**completion(each.outputs[0]), "cached_tokens": each.num_cached_tokens}
        for outputs in rounds
        for each in outputs
    ]


def run_pinned_text(llm: LLM) -> Any:
    """A text of the image's own tokens is pinned: no request with an image may find it."""
    from vllm_relay.prefix_cache.pins.client import pin, unpin

    prompt = {
        "prompt_token_ids": tokens(1, TEXT_TOKENS),
        "multi_modal_data": {"image": image(5)},
    }
    [output] = llm.generate([prompt], greedy(1), use_tqdm=False)
    entry = pin(llm, list(output.prompt_token_ids), "text")
    [after] = llm.generate([{**prompt, "multi_modal_data": {"image": image(6)}}], greedy(1))
    unpin(llm, entry.id)
    return {"resident": entry.resident, "cached_tokens": after.num_cached_tokens}


def run_reset(llm: LLM) -> Any:
    """Whether every block has come back."""
    return llm.reset_prefix_cache()


SCENARIOS = {"images": run_images, "pinned_text": run_pinned_text, "reset": run_reset}


def main() -> None:
    output_path, args_path, *names = sys.argv[1:]
    llm = LLM(**{**ENGINE_ARGS, **MULTIMODAL_ARGS, **json.loads(Path(args_path).read_text())})
    results = {name: SCENARIOS[name](llm) for name in names}
    results["metrics"] = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    Path(output_path).write_text(json.dumps(results))


if __name__ == "__main__":
    main()

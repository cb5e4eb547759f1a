# SPDX-License-Identifier: Apache-2.0
"""Pin prompts in a real LLM, and write what happened to a JSON file.

python -m tests.prefix_cache.pins.engine_main MODEL SYSTEM_PROMPT OUTPUT
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

SYSTEM = "river amber stone " * 20


def main(model: str, system_prompt: str, output: str) -> None:
    from vllm import LLM, SamplingParams

    from vllm_relay import prefix_cache

    llm = LLM(
        model,
        additional_config={"relay": {"scheduler": True, "system_prompts": [system_prompt]}},
        attention_backend="relay",
        block_size=32,
        disable_log_stats=False,
        dtype="float32",
        enforce_eager=True,
        num_gpu_blocks_override=48,
    )
    params = SamplingParams(max_tokens=2, temperature=0.0)
    system = [{"role": "system", "content": system_prompt}]
    prompt = [3 + 7 * i % 300 for i in range(100)]

    def cached_tokens() -> list[int]:
        outputs = [
            *llm.chat([*system, {"role": "user", "content": "stone"}], params, use_tqdm=False),
            *llm.generate([{"prompt_token_ids": [*prompt, 5, 6]}], params, use_tqdm=False),
        ]
        return [output.num_cached_tokens for output in outputs]

    def flood() -> None:
        others = [[3 + (i * 13 + j * 17) % 300 for j in range(300)] for i in range(12)]
        llm.generate([{"prompt_token_ids": each} for each in others], params, use_tqdm=False)

    seen: dict[str, Any] = {"at_start": [asdict(pin) for pin in prefix_cache.list_pins(llm)]}
    seen["pin"] = asdict(prefix_cache.pin(llm, prompt, "a"))
    seen["same"] = asdict(prefix_cache.pin(llm, prompt, "a"))
    seen["text"] = asdict(prefix_cache.pin(llm, system_prompt))
    prefix_cache.unpin(llm, seen["text"]["id"])
    seen["errors"] = []
    strange: list[Any] = [
        [{"content": SYSTEM}],
        [{"role": 5, "content": SYSTEM}],
        [{"role": ["user"], "content": SYSTEM}],
        "\ud800" * 50,
    ]
    for bad in (prompt[:9], "river " * 600, [10**6] * 64, *strange):
        try:
            prefix_cache.pin(llm, bad)
        except prefix_cache.PinError as error:
            seen["errors"].append([error.status, str(error)])
    flood()
    seen["cached_after_flood"] = cached_tokens()
    seen["top"] = prefix_cache.top_prefixes(llm)
    seen["reset"] = llm.reset_prefix_cache()
    seen["resident_after_reset"] = [pin.resident for pin in prefix_cache.list_pins(llm)]
    seen["cached_after_reset"] = cached_tokens()
    flood()
    seen["cached_after_second_flood"] = cached_tokens()
    prefix_cache.unpin(llm, "a")
    flood()
    seen["cached_after_unpin"] = cached_tokens()
    seen["left"] = [pin.id for pin in prefix_cache.list_pins(llm)]
    metrics: Counter[str] = Counter()  # evicted blocks have a count for each reason
    for metric in llm.get_metrics():
        metrics[metric.name] += getattr(metric, "value", 0)
    seen["metrics"] = metrics

    def pinned_blocks() -> float:
        return {each.name: each for each in llm.get_metrics()}["relay:pinned_blocks"].value

    prefix_cache.pin(llm, prompt, "a")
    seen["pinned_blocks_when_idle"] = [pinned_blocks()]
    prefix_cache.unpin(llm, "a")
    seen["pinned_blocks_when_idle"].append(pinned_blocks())
    prefix_cache.unpin(llm, "system-0")  # as Python may
    seen["pinned_blocks_when_idle"].append(pinned_blocks())
    Path(output).write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])

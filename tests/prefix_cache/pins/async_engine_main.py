# SPDX-License-Identifier: Apache-2.0
"""Ask an AsyncLLM with a system prompt, without a server, and write what happened to a JSON file.

python -m tests.prefix_cache.pins.async_engine_main MODEL SYSTEM_PROMPT OUTPUT
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any


async def use(engine: Any, system_prompt: str) -> dict[str, Any]:
    from vllm import SamplingParams

    from vllm_relay.prefix_cache.pins.client import list_pins_async

    params = SamplingParams(max_tokens=2, temperature=0.0)

    async def cached_tokens(prompt: list[int], request_id: str) -> int:
        async for output in engine.generate({"prompt_token_ids": prompt}, params, request_id):
            last = output
        return last.num_cached_tokens

    def chat(question: str) -> list[int]:
        messages = [
            {"role": "system", "content": system_prompt},
            {"role": "user", "content": question},
        ]
        return engine.get_tokenizer().apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )

    first = [cached_tokens(chat(each), each) for each in ("stone", "river")]
    seen: dict[str, Any] = {"cached_at_first": await asyncio.gather(*first)}
    seen["pins"] = [asdict(pin) for pin in await list_pins_async(engine)]
    others = [[3 + (i * 13 + j * 17) % 300 for j in range(300)] for i in range(12)]
    await asyncio.gather(*(cached_tokens(other, f"o{i}") for i, other in enumerate(others)))
    seen["cached_after_flood"] = await cached_tokens(chat("amber"), "last")
    return seen


def main(model: str, system_prompt: str, output: str) -> None:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    args = AsyncEngineArgs(
        model,
        additional_config={"relay": {"scheduler": True, "system_prompts": [system_prompt]}},
        attention_backend="relay",
        block_size=32,
        dtype="float32",
        enforce_eager=True,
        num_gpu_blocks_override=48,
    )
    engine = AsyncLLM.from_engine_args(args)
    try:
        seen = asyncio.run(use(engine, system_prompt))
    finally:
        engine.shutdown()
    Path(output).write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])

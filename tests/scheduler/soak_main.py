# SPDX-License-Identifier: Apache-2.0
"""A soak of a real engine with a small cache.

Usage: python -m tests.scheduler.soak_main MODEL OUTPUT.json          what vLLM answers, alone
       python -m tests.scheduler.soak_main MODEL OUTPUT.json SECONDS SEED EXPECTED.json
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from vllm import LLM, EngineArgs, LLMEngine

from tests.integration.engine_main import ENGINE_ARGS, completion, greedy
from tests.integration.runs import ROBUST_LEAD
from tests.scheduler.soak import OUTPUT_TOKENS, Question, Soak, prompts

NUM_BLOCKS = 28


def answer_alone(model: str) -> list[dict[str, Any]]:
    llm = LLM(**{**ENGINE_ARGS, "model": model, "attention_backend": "cpu_attn"})
    results = []
    for prompt in prompts():
        [output] = llm.generate(
            [{"prompt_token_ids": prompt}], greedy(OUTPUT_TOKENS, logprobs=2), use_tqdm=False
        )
        results.append(completion(output.outputs[0]))
    return results


def soak(model: str, seconds: float, seed: int, expected: list[dict[str, Any]]) -> dict[str, int]:
    def check(question: Question, actual: list[int]) -> None:
        theirs, count = expected[question.prompt], question.output_tokens
        leads = theirs["leads"][:count]
        sure = next((i for i, lead in enumerate(leads) if lead < ROBUST_LEAD), count)
        assert len(actual) == count
        assert actual[:sure] == theirs["token_ids"][:sure], f"{question}: {actual}"

    args = {
        **ENGINE_ARGS,
        "model": model,
        "attention_backend": "relay",
        "num_gpu_blocks_override": NUM_BLOCKS,
        "additional_config": {"relay": {"scheduler": True, "max_hold_s": 0.2, "max_overtakes": 8}},
    }
    engine = LLMEngine.from_engine_args(EngineArgs(**args))
    run = Soak(engine, seed, check)
    end_s = time.monotonic() + seconds
    run.run_while(lambda: time.monotonic() < end_s)
    run.check_nothing_is_left()
    metrics = {m.name: m.value for m in engine.get_metrics() if hasattr(m, "value")}
    return {**run.counts, "preemptions": metrics["vllm:num_preemptions"]}


def main() -> None:
    model, output_path, *arguments = sys.argv[1:]
    if arguments:
        seconds, seed, expected_path = arguments
        expected = json.loads(Path(expected_path).read_text())
        result: Any = soak(model, float(seconds), int(seed), expected)
    else:
        result = answer_alone(model)
    Path(output_path).write_text(json.dumps(result))


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Greedy answers of an engine, and how far its best tokens were ahead."""

from __future__ import annotations

from typing import Any

from vllm import LLM, SamplingParams

from tests.integration.engine_main import completion

ANSWER_TOKENS = 12


def tokens_prompts(prompts: list[list[int]]) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def greedy(max_tokens: int, **arguments: Any) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=2, **arguments
    )


def generate(llm: LLM, prompts: list[list[int]], max_tokens: int = ANSWER_TOKENS) -> Any:
    outputs = llm.generate(tokens_prompts(prompts), greedy(max_tokens), use_tqdm=False)
    return [found(output) for output in outputs]


def found(output: Any) -> dict[str, Any]:
    """Of the output of a request with one answer."""
    return {**completion(output.outputs[0]), "cached_tokens": output.num_cached_tokens}

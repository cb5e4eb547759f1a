# SPDX-License-Identifier: Apache-2.0
"""The process of `english_engine.EnglishEngine`."""

from __future__ import annotations

import sys

from vllm import LLM

from benchmarks.long_context.english_engine import Answer, EnglishSettings
from benchmarks.support.decoding import exactly
from tests.support.forced_tokens import ForcedTokens, forced
from vllm_relay.demo.engine_main import start_llm
from vllm_relay.demo.engine_process import serve

NUM_LOGPROBS = 100
"""So many that the twenty best tokens of another engine are nearly always among them."""


def start(settings: EnglishSettings) -> LLM:
    return start_llm(
        settings.engine,
        with_metrics=True,
        additional_config={"relay": settings.relay},
        logits_processors=[f"{ForcedTokens.__module__}:{ForcedTokens.__name__}"],
        max_logprobs=NUM_LOGPROBS,
    )


def answer(llm: LLM, prompt: list[int], token_ids: list[int] | None, output_tokens: int) -> Answer:
    if token_ids is None:
        sampling = exactly(output_tokens, logprobs=NUM_LOGPROBS)
    else:
        sampling = forced(token_ids, NUM_LOGPROBS)
    before = _counted(llm)
    [output] = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    [completion] = output.outputs
    logprobs = [
        {token: entry.logprob for token, entry in position.items()}
        for position in completion.logprobs
    ]
    best = [max(position, key=position.__getitem__) for position in logprobs]
    searched, retrieved = (
        after - earlier for after, earlier in zip(_counted(llm), before, strict=True)
    )
    return Answer(list(completion.token_ids), logprobs, best, searched, retrieved)


def _counted(llm: LLM) -> tuple[int, int]:
    """Tokens that searches could have given, and gave."""
    found = {each.name: each for each in llm.get_metrics()}
    names = ("relay:host_searched_tokens", "relay:host_retrieved_tokens")
    searched, retrieved = (int(getattr(found.get(name), "value", 0)) for name in names)
    return searched, retrieved


if __name__ == "__main__":
    serve(int(sys.argv[1]), start, answer)

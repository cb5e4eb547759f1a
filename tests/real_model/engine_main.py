# SPDX-License-Identifier: Apache-2.0
"""Asks one engine, in a process of its own.

Usage: python -m tests.real_model.engine_main MODEL ENGINE_ARGS.json OUTPUT.json SCENARIO...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.integration.engine_main import completion
from tests.real_model.workload import (
    BLOCK_SIZE_TOKENS,
    FORCED_BRANCHES,
    TABLE,
    TABLE_CHOICES,
    TABLE_QUESTION,
    TOP_LOGPROBS,
    chats,
    forced_prompts,
    forced_token_ids,
    modular_prompts,
    plain_prompts,
    schema_store,
)
from tests.support.forced_tokens import ForcedTokens, forced

ENGINE_ARGS = {
    "block_size": BLOCK_SIZE_TOKENS,
    "disable_log_stats": False,
    "dtype": "float32",
    "enforce_eager": True,
    "logits_processors": [ForcedTokens],
    "max_model_len": 1024,
    "max_num_seqs": 64,
    "num_gpu_blocks_override": 192,
    "seed": 0,
}
NUM_BRANCHES = 2
ANSWER_TOKENS = 16


def tokens_prompts(prompts: list[list[int]]) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def greedy(max_tokens: int, **arguments: Any) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=2, **arguments
    )


def generate(llm: LLM, prompts: list[list[int]], params: Any) -> list[dict[str, Any]]:
    outputs = llm.generate(tokens_prompts(prompts), params, use_tqdm=False)
    return [
        {**completion(output.outputs[0]), "cached_tokens": output.num_cached_tokens}
        for output in outputs
    ]


def run_chats(llm: LLM, model: str) -> Any:
    """A question to each branch first, as where its system prompt is in use; then all others."""
    prompts = chats(model, num_branches=NUM_BRANCHES, tokens=300, questions=8)
    first, rest = prompts[:NUM_BRANCHES], prompts[NUM_BRANCHES:]
    return [
        answer for asked in (first, rest) for answer in generate(llm, asked, greedy(ANSWER_TOKENS))
    ]


def run_table(llm: LLM, model: str) -> Any:
    """With llm_map; the prompts that it made come with the answers, for other engines."""
    import pandas as pd

    from tests.tables.engines.in_process_main import Recorded
    from vllm_relay.tables import llm_map
    from vllm_relay.tables.engines.in_process import InProcessEngine

    engine = Recorded(InProcessEngine(llm))
    table = pd.DataFrame(TABLE)
    found = llm_map(table, TABLE_QUESTION, engine=engine, choices=TABLE_CHOICES)
    asked = {prompt.number: list(prompt.token_ids) for prompt in engine.prompts}
    return {"answers": list(found.values), "prompts": [asked[row] for row in range(len(table))]}


def run_rows(llm: LLM, model: str, prompts: list[list[int]]) -> Any:
    """Prompts of a table, by vLLM's own means."""
    params = SamplingParams(
        temperature=0,
        max_tokens=8,
        structured_outputs=StructuredOutputsParams(choice=list(TABLE_CHOICES)),
    )
    outputs = llm.generate(tokens_prompts(prompts), params, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def run_modules(llm: LLM, model: str) -> Any:
    """As modules, and written out; all log-probabilities of the first."""
    from vllm_relay.modules.prompt.plan import EXTRA_ARG

    tokenizer = llm.get_tokenizer()
    store = schema_store(tokenizer)
    modular, exact = (
        [store.render(text, mode=mode) for text in modular_prompts()]
        for mode in ("modular", "exact")
    )
    params = []
    for prompt in modular:
        params.append(greedy(2, extra_args={EXTRA_ARG: prompt.plan.to_argument()}))
        params[-1].logprobs = TOP_LOGPROBS
    asked = tokens_prompts([prompt.token_ids for prompt in modular])
    outputs = llm.generate(asked, params, use_tqdm=False)
    plain = [tokenizer.encode(text, add_special_tokens=False) for text in plain_prompts()]
    return {
        "modular": [top_logprobs(output) for output in outputs],
        "exact": generate(llm, [prompt.token_ids for prompt in exact], greedy(ANSWER_TOKENS)),
        "plain": generate(llm, plain, greedy(ANSWER_TOKENS)),
    }


def run_forced(llm: LLM, model: str) -> Any:
    """Log-probabilities of the best tokens, where all engines generate the same ones."""
    prompts = forced_prompts(model)
    first, rest = prompts[:FORCED_BRANCHES], prompts[FORCED_BRANCHES:]
    params = forced(forced_token_ids(model), TOP_LOGPROBS)
    outputs = []
    for asked in (first, rest):
        outputs += llm.generate(tokens_prompts(asked), params, use_tqdm=False)
    return [top_logprobs(output) for output in outputs]


def top_logprobs(output: Any) -> dict[str, Any]:
    """Of the tokens that were generated: ids, and log-probabilities by token for each position."""
    [answer] = output.outputs
    return {
        "token_ids": list(answer.token_ids),
        "logprobs": [
            {token: entry.logprob for token, entry in position.items()}
            for position in answer.logprobs
        ],
    }


def main(model: str, args_path: str, output: str, *scenarios: str) -> None:
    engine_args = json.loads(Path(args_path).read_text())
    prompts = engine_args.pop("table_prompts", [])
    llm = LLM(model, **{**ENGINE_ARGS, **engine_args})
    run = {
        "chats": run_chats,
        "table": run_table,
        "rows": lambda llm, model: run_rows(llm, model, prompts),
        "modules": run_modules,
        "forced": run_forced,
    }
    found = {scenario: run[scenario](llm, model) for scenario in scenarios}
    found["metrics"] = {
        metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")
    }
    Path(output).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

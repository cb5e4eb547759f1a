# SPDX-License-Identifier: Apache-2.0
"""Asks one engine, in a process of its own.

Usage: python -m tests.real_model.engine_main MODEL ENGINE_ARGS.json OUTPUT.json SCENARIO...
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm import LLM
from vllm.model_executor.layers import utils as layer_utils

from tests.real_model.context_scenarios import (
    run_documents,
    run_found_document,
    run_kept_document,
)
from tests.real_model.generation import ANSWER_TOKENS, found, generate, greedy, tokens_prompts
from tests.real_model.table_scenarios import run_rows, run_sql, run_table
from tests.real_model.workload import (
    BLOCK_SIZE_TOKENS,
    FORCED_BRANCHES,
    TOP_LOGPROBS,
    conversations,
    forced_prompts,
    forced_token_ids,
    modular_prompts,
    plain_prompts,
    rounds_of_chats,
    schema_store,
    system_texts,
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


def run_chats(llm: LLM, model: str) -> Any:
    return [answer for asked in rounds_of_chats(model) for answer in generate(llm, asked)]


def run_messages(llm: LLM, model: str) -> Any:
    """Of both branches that `system_texts` are of."""
    outputs = llm.chat(conversations(), greedy(ANSWER_TOKENS), use_tqdm=False)
    return [found(output) for output in outputs]


def run_pin(llm: LLM, model: str) -> Any:
    """The second branch; the first one is the engine's by option."""
    from vllm_relay import prefix_cache

    prefix_cache.pin(llm, [{"role": "system", "content": system_texts()[1]}], "second")
    return [asdict(each) for each in prefix_cache.list_pins(llm)]


def run_pinned(llm: LLM, model: str) -> Any:
    """When others have filled the cache: a chat that was not pinned, and those that were."""
    from vllm_relay import prefix_cache

    other = rounds_of_chats(model)[0][0]
    return {
        "answers": run_messages(llm, model),
        "others": generate(llm, [other], 1),
        "pins": [asdict(each) for each in prefix_cache.list_pins(llm)],
    }


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
        "exact": generate(llm, [prompt.token_ids for prompt in exact]),
        "plain": generate(llm, plain),
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


def multiply_in_float32(layer: torch.nn.Module, remove_weight: bool) -> None:
    """In the place of vLLM's choice for a linear layer. Products of bfloat16 are exact in float32;
    sums are rounded once, as where processors multiply bfloat16: others take five times as long."""
    weight = layer.weight.float()

    def multiply(x: torch.Tensor, _: Any, bias: torch.Tensor | None) -> torch.Tensor:
        bias = None if bias is None else bias.float()
        return torch.nn.functional.linear(x.float(), weight, bias).to(x.dtype)

    layer.cpu_linear = multiply


SCENARIOS: dict[str, Callable[[LLM, str], Any]] = {
    "chats": run_chats,
    "messages": run_messages,
    "pin": run_pin,
    "pinned": run_pinned,
    "table": run_table,
    "sql": run_sql,
    "modules": run_modules,
    "forced": run_forced,
    "documents": run_documents,
    "first_kept": partial(run_kept_document, number=0),
    "first_found": run_found_document,
    "second_kept": partial(run_kept_document, number=1),
}


def main(model: str, args_path: str, output: str, *scenarios: str) -> None:
    """With `rows` among the engine's arguments, `run_rows` is asked for them too."""
    engine_args = json.loads(Path(args_path).read_text())
    asked = engine_args.pop("rows", {})
    if engine_args.get("dtype") == "bfloat16":
        layer_utils.dispatch_cpu_unquantized_gemm = multiply_in_float32
    llm = LLM(model, **{**ENGINE_ARGS, **engine_args})
    results = {scenario: SCENARIOS[scenario](llm, model) for scenario in scenarios}
    results["rows"] = run_rows(llm, asked)
    results["metrics"] = {
        metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")
    }
    Path(output).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])

# SPDX-License-Identifier: Apache-2.0
"""`vllm-relay demo`: the same workload answered by stock vLLM and by vLLM with relay.

Both engines are started with the same settings, each in its own process, and take turns.  First
each answers one question per system prompt, which warms it up and fills its prefix cache; in the
timed rounds it answers questions it has not seen, as a server does whose system prompts are in use.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.console import Console
from transformers import AutoTokenizer

from vllm_relay.arguments import check_model
from vllm_relay.demo.engine import Engine, EngineSettings, RoundResult
from vllm_relay.demo.engine_process import in_turn, running_engines, wait_until_workers_sleep
from vllm_relay.demo.options import DemoOptions
from vllm_relay.demo.recall_model import build_recall_model
from vllm_relay.demo.report import Comparison, compare, comparison_table
from vllm_relay.demo.requests import Request, WorkloadSizes, general_requests, recall_requests
from vllm_relay.demo.smollm2 import download as smollm2
from vllm_relay.demo.smollm2.library import library_workload
from vllm_relay.demo.workload import check_at_least

_MAX_NUM_SEQS = 256
_WARM_UP_OUTPUT_TOKENS = 4
_SHOWN_TOKENS = 32
_WHY_OUTPUTS_DIFFER = (
    "Two kernels round differently, and where two tokens are about as likely, answers part; in "
    "{dtype} that is soon. With --dtype float32 they stay the same."
)


def run_demo(
    options: DemoOptions,
    model: str | None = None,
    *,
    num_system_prompts: int = 8,
    system_prompt_tokens: int = 4096,
    questions_per_prompt: int = 24,
    output_tokens: int = 64,
    rounds: int = 2,
) -> int:
    """Run the comparison, print a table and return the exit status.

    Args:
        model: a Hugging Face folder or hub id, or "smollm2" for the model from the package index,
            which is asked in plain English; None builds the recall model, with known answers.
        num_system_prompts: number of long system prompts.
        system_prompt_tokens: length of each, cut to what the model can take.
        questions_per_prompt: conversations under each system prompt in one round.
        output_tokens: length of every answer, at least 2.
        rounds: timed rounds of each engine, each with questions of its own.

    Returns:
        0, or 1 if a setting is out of its range, an engine failed or, with the recall model,
        answers are wrong or tokens differ; the reason is printed.
    """
    sizes = WorkloadSizes(
        num_system_prompts, system_prompt_tokens, 1 + rounds * questions_per_prompt, output_tokens
    )
    comparison = options.run(lambda: _run(options, model, sizes, questions_per_prompt, rounds))
    if comparison is None:
        return 1
    options.console.print(comparison_table(comparison))
    if comparison.may_round_apart and options.dtype != "float32":
        options.console.print(_WHY_OUTPUTS_DIFFER.format(dtype=options.dtype), highlight=False)
    options.write_json(
        {
            "model": model or "recall",
            "dtype": options.dtype,
            "seed": options.seed,
            "rounds": rounds,
            "num_system_prompts": num_system_prompts,
            "system_prompt_tokens": system_prompt_tokens,
            "questions_per_prompt": questions_per_prompt,
            **comparison.as_dict(),
        }
    )
    return options.conclude(
        comparison.problems(),
        f"Relay generated in {comparison.relay.generation_s:.2f} s what took stock vLLM "
        f"{comparison.stock.generation_s:.2f} s: {comparison.speedup:.2f} times as fast.",
        next_step="vllm-relay predict prompts.jsonl --model MODEL --sweep 0.5,1,2,4, for what "
        "prompts of yours gain; "
        "vllm serve MODEL --attention-backend relay, to serve them",
    )


def _run(
    options: DemoOptions,
    model: str | None,
    sizes: WorkloadSizes,
    questions_per_prompt: int,
    rounds: int,
) -> Comparison:
    check_at_least(1, rounds=rounds, questions_per_prompt=questions_per_prompt)
    with options.folder() as folder:
        with options.console.status("making the questions"):
            if model is None:
                made = build_recall_model(
                    folder / "recall-model", dtype=options.dtype, seed=options.seed
                )
                path = str(made)
                requests = recall_requests(path, sizes, options.seed)
            elif model == smollm2.NAME:
                path = str(smollm2.smollm2_folder())
                requests = general_requests(path, sizes, options.seed, library_workload)
            else:
                check_model(model)
                path = model
                requests = general_requests(path, sizes, options.seed)
        warm_up = requests[: sizes.num_system_prompts]
        timed = requests[sizes.num_system_prompts :]
        round_size = len(timed) // rounds
        prompt_tokens = sum(len(r.prompt_token_ids) for r in timed) // len(timed)
        options.console.print(
            f"{model or 'The recall model'} in {options.dtype}: {len(timed)} questions under "
            f"{sizes.num_system_prompts} system prompts, {round_size} at a time, "
            f"about {prompt_tokens:,} prompt tokens and {sizes.output_tokens} output tokens each."
        )
        settings = EngineSettings(
            model=path,
            attention_backend=None,
            dtype=options.dtype,
            max_model_len=max(len(r.prompt_token_ids) for r in requests) + sizes.output_tokens,
            max_num_seqs=min(round_size, _MAX_NUM_SEQS),
        )
        timed_rounds = [timed[i : i + round_size] for i in range(0, len(timed), round_size)]
        stock, relay = _results(
            warm_up, timed_rounds, settings, sizes.output_tokens, folder, options.console
        )
        if model is not None:
            _show_answer(path, timed[0], relay[0].token_ids[0], options.console)
    return compare(timed, stock, relay)


def _show_answer(path: str, request: Request, token_ids: list[int], console: Console) -> None:
    """The end of the first prompt, and what relay answered."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    asked = tokenizer.decode(request.prompt_token_ids[-_SHOWN_TOKENS:], skip_special_tokens=True)
    answer = tokenizer.decode(token_ids, skip_special_tokens=True)
    console.print("For example: ..." + " ".join(str(asked).split()), markup=False, highlight=False)
    console.print(" ".join(str(answer).split()), style="cyan", markup=False, highlight=False)


def _results(
    warm_up: list[Request],
    timed_rounds: list[list[Request]],
    settings: EngineSettings,
    output_tokens: int,
    folder: Path,
    console: Console,
) -> list[list[RoundResult]]:
    """Of both engines. Which one begins changes with every round."""
    both_settings = [("stock", settings), ("relay", replace(settings, attention_backend="relay"))]
    with (
        console.status("starting stock vLLM and vLLM with relay") as status,
        running_engines(
            Engine(name, each, folder / f"{name}.log") for name, each in both_settings
        ) as engines,
    ):
        for engine in engines:
            status.update(f"{engine.name}: warming up")
            engine.generate([r.prompt_token_ids for r in warm_up], _WARM_UP_OUTPUT_TOKENS)
        results: list[list[RoundResult]] = [[] for _ in engines]
        for i, requests in enumerate(timed_rounds):
            prompts = [r.prompt_token_ids for r in requests]
            for engine, of_engine in in_turn(zip(engines, results, strict=True), i):
                wait_until_workers_sleep()
                status.update(f"{engine.name}: round {i + 1} of {len(timed_rounds)}")
                of_engine.append(engine.generate(prompts, output_tokens))
        status.update("stopping the engines")
    return results

# SPDX-License-Identifier: Apache-2.0
"""`vllm-relay demo`: the same workload answered by stock vLLM and by vLLM with relay.

Both engines are started with the same settings, each in its own process, and take turns.  First
each answers one question per system prompt, which warms it up and fills its prefix cache; in the
timed rounds it answers questions it has not seen, as a server does whose system prompts are in use.
"""

from __future__ import annotations

import json
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.status import Status

from vllm_relay.arguments import check_model, check_writable
from vllm_relay.demo.engine import Engine, EngineSettings, RoundResult
from vllm_relay.demo.engine_process import EngineError, wait_until_workers_sleep
from vllm_relay.demo.recall_model import build_recall_model
from vllm_relay.demo.report import Comparison, compare, comparison_table
from vllm_relay.demo.requests import Request, WorkloadSizes, general_requests, recall_requests

_MAX_NUM_SEQS = 256
_WARM_UP_OUTPUT_TOKENS = 4


def run_demo(
    model: str | None = None,
    *,
    num_system_prompts: int = 8,
    system_prompt_tokens: int = 4096,
    questions_per_prompt: int = 24,
    output_tokens: int = 64,
    rounds: int = 2,
    dtype: str = "bfloat16",
    seed: int = 0,
    keep: Path | None = None,
    json_path: Path | None = None,
    console: Console | None = None,
) -> int:
    """Run the comparison, print a table and return the exit status.

    Args:
        model: a Hugging Face folder or hub id; None builds the recall model, with known answers.
        num_system_prompts: number of long system prompts.
        system_prompt_tokens: length of each, cut to what the model can take.
        questions_per_prompt: conversations under each system prompt in one round.
        output_tokens: length of every answer, at least 2.
        rounds: timed rounds of each engine, each with questions of its own.
        dtype: of the weights, the activations and the KV cache.
        seed: the same seed gives the same model and workload.
        keep: where the recall model and the logs are kept; a temporary directory if None.
        json_path: where all numbers are written as JSON.
        console: where to print; the standard output if None.

    Returns:
        0, or 1 if a setting is out of its range, an engine failed or, with the recall model,
        answers are wrong or tokens differ; the reason is printed.
    """
    console = console or Console()
    sizes = WorkloadSizes(
        num_system_prompts, system_prompt_tokens, 1 + rounds * questions_per_prompt, output_tokens
    )
    with ExitStack() as stack:
        directory = keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        try:
            check_writable("--json", json_path)
            for name, count in [("rounds", rounds), ("questions_per_prompt", questions_per_prompt)]:
                if count < 1:
                    raise ValueError(f"{name} is {count}, expected at least 1")
            directory.mkdir(parents=True, exist_ok=True)
            with console.status("making the questions"):
                if model is None:
                    made = build_recall_model(directory / "recall-model", dtype=dtype, seed=seed)
                    path = str(made)
                    requests = recall_requests(path, sizes, seed)
                else:
                    check_model(model)
                    path = model
                    requests = general_requests(path, sizes, seed)
            warm_up, timed = requests[:num_system_prompts], requests[num_system_prompts:]
            round_size = len(timed) // rounds
            prompt_tokens = sum(len(r.prompt_token_ids) for r in timed) // len(timed)
            console.print(
                f"{model or 'The recall model'} in {dtype}: {len(timed)} questions under "
                f"{num_system_prompts} system prompts, {round_size} at a time, "
                f"about {prompt_tokens:,} prompt tokens and {output_tokens} output tokens each."
            )
            comparison = _compare_engines(
                warm_up,
                [timed[i : i + round_size] for i in range(0, len(timed), round_size)],
                _engine_settings(path, requests, round_size, output_tokens, dtype),
                output_tokens,
                directory,
                console,
            )
        except (EngineError, OSError, ValueError) as error:
            console.print(str(error), style="red", markup=False, highlight=False)
            return 1
    console.print(comparison_table(comparison))
    if json_path is not None:
        numbers = {
            "model": model or "recall",
            "dtype": dtype,
            "seed": seed,
            "rounds": rounds,
            "num_system_prompts": num_system_prompts,
            "system_prompt_tokens": system_prompt_tokens,
            "questions_per_prompt": questions_per_prompt,
            **comparison.as_dict(),
        }
        json_path.write_text(json.dumps(numbers, indent=2) + "\n")
    return _conclude(comparison, console)


def _engine_settings(
    path: str, requests: list[Request], round_size: int, output_tokens: int, dtype: str
) -> EngineSettings:
    return EngineSettings(
        model=path,
        attention_backend=None,
        dtype=dtype,
        max_model_len=max(len(r.prompt_token_ids) for r in requests) + output_tokens,
        max_num_seqs=min(round_size, _MAX_NUM_SEQS),
    )


def _compare_engines(
    warm_up: list[Request],
    timed_rounds: list[list[Request]],
    settings: EngineSettings,
    output_tokens: int,
    directory: Path,
    console: Console,
) -> Comparison:
    with ExitStack() as stack:
        status = stack.enter_context(console.status("starting stock vLLM and vLLM with relay"))
        engines = [
            stack.enter_context(Engine(name, engine_settings, directory / f"{name}.log"))
            for name, engine_settings in [
                ("stock", settings),
                ("relay", replace(settings, attention_backend="relay")),
            ]
        ]
        for engine in engines:
            engine.wait()
        for engine in engines:
            status.update(f"{engine.name}: warming up")
            engine.generate([r.prompt_token_ids for r in warm_up], _WARM_UP_OUTPUT_TOKENS)
        stock, relay = _take_turns(engines, timed_rounds, output_tokens, status)
        status.update("stopping the engines")
        for engine in engines:
            engine.ask_to_stop()
    return compare([r for requests in timed_rounds for r in requests], stock, relay)


def _take_turns(
    engines: list[Engine], timed_rounds: list[list[Request]], output_tokens: int, status: Status
) -> list[list[RoundResult]]:
    """Every round by one engine and then the other; which one begins changes every round."""
    results: list[list[RoundResult]] = [[] for _ in engines]
    for i, requests in enumerate(timed_rounds):
        prompts = [r.prompt_token_ids for r in requests]
        turns = list(zip(engines, results, strict=True))
        for engine, engine_results in turns if i % 2 == 0 else reversed(turns):
            wait_until_workers_sleep()
            status.update(f"{engine.name}: round {i + 1} of {len(timed_rounds)}")
            engine_results.append(engine.generate(prompts, output_tokens))
    return results


def _conclude(comparison: Comparison, console: Console) -> int:
    problems = comparison.problems()
    for problem in problems:
        console.print(problem, style="red", markup=False, highlight=False)
    if problems:
        return 1
    console.print(
        f"Relay generated in {comparison.relay.generation_s:.2f} s what took stock vLLM "
        f"{comparison.stock.generation_s:.2f} s: {comparison.speedup:.2f} times as fast.",
        style="green",
        highlight=False,
    )
    return 0

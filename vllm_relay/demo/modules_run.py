# SPDX-License-Identifier: Apache-2.0
"""`vllm-relay demo --modules`: questions to parts of a document, in any combination.

Stock vLLM gets the parts as plain text, in the order of the question, and reuses what prompts begin
with; relay imports them as modules. Both answer one question at a time, in turn.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from vllm_relay.arguments import check_writable
from vllm_relay.demo.engine import EngineSettings
from vllm_relay.demo.engine_process import EngineError, wait_until_workers_sleep
from vllm_relay.demo.modules_engine import BLOCK_SIZE_TOKENS, ModulesAnswer, ModulesEngine
from vllm_relay.demo.modules_workload import PartsWorkload, parts_workload
from vllm_relay.demo.recall_model import build_recall_model
from vllm_relay.prefix_cache.modules.plan import EXTRA_ARG
from vllm_relay.prefix_cache.modules.schema_store import SchemaStore

_NAMES = ("prefix cache", "modules")
NUM_PARTS = 12
PART_TOKENS = 1000
PARTS_PER_QUESTION = 4


@dataclass(frozen=True)
class ModulesReport:
    """One engine over all questions; times are medians of those after the first half, when most
    parts have been read."""

    questions: int
    answers_right: int
    prompt_tokens: int
    cached_tokens: int
    first_token_s: float


def run_modules_demo(
    *,
    num_questions: int,
    output_tokens: int,
    dtype: str = "bfloat16",
    seed: int = 0,
    keep: Path | None = None,
    json_path: Path | None = None,
    console: Console | None = None,
) -> int:
    """Run the comparison, print a table and return the exit status.

    Args:
        num_questions: from 4 on.
        output_tokens: length of every answer, 2 to 8.
        dtype: of the weights, the activations and the KV cache.
        seed: the same seed gives the same model and questions.
        keep: where the recall model and the logs are kept; a temporary directory if None.
        json_path: where all numbers are written as JSON.
        console: where to print; the standard output if None.

    Returns:
        0, or 1 if a setting is out of its range, an engine failed or answers are wrong; the reason
        is printed.
    """
    console = console or Console()
    with ExitStack() as stack:
        directory = keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        try:
            check_writable("--json", json_path)
            if num_questions < 4:
                raise ValueError(f"num_questions is {num_questions}, expected at least 4")
            directory.mkdir(parents=True, exist_ok=True)
            workload = parts_workload(
                num_parts=NUM_PARTS,
                part_tokens=PART_TOKENS,
                parts_per_question=PARTS_PER_QUESTION,
                num_questions=num_questions,
                output_tokens=output_tokens,
                seed=seed,
            )
            model = build_recall_model(directory / "recall-model", dtype=dtype, seed=seed)
            console.print(
                f"The recall model in {dtype}: {num_questions} questions, each to "
                f"{PARTS_PER_QUESTION} of {NUM_PARTS} parts of {PART_TOKENS:,} tokens, one at a "
                "time."
            )
            answers = _answers(workload, model, dtype, output_tokens, directory, console)
            tokenizer = AutoTokenizer.from_pretrained(model)
            expected = [
                tokenizer.encode(each.answer, add_special_tokens=False)
                for each in workload.questions
            ]
        except (EngineError, OSError, ValueError) as error:
            console.print(str(error), style="red", markup=False, highlight=False)
            return 1
    prefix, modules = (_report(expected, each) for each in answers)
    console.print(_table(prefix, modules))
    if json_path is not None:
        numbers: dict[str, Any] = {"prefix_cache": asdict(prefix), "modules": asdict(modules)}
        json_path.write_text(json.dumps({"dtype": dtype, "seed": seed, **numbers}, indent=2) + "\n")
    wrong = [
        f"{name}: {report.questions - report.answers_right} of {report.questions} answers are wrong"
        for name, report in zip(_NAMES, (prefix, modules), strict=True)
        if report.answers_right < report.questions
    ]
    for problem in wrong:
        console.print(problem, style="red", markup=False, highlight=False)
    return 1 if wrong else 0


def _answers(
    workload: PartsWorkload,
    model: Path,
    dtype: str,
    output_tokens: int,
    directory: Path,
    console: Console,
) -> list[list[ModulesAnswer]]:
    """Of both engines. Which one begins changes with every question."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    store = SchemaStore(tokenizer, block_size=BLOCK_SIZE_TOKENS)
    positions = store.add(workload.schema).size_tokens
    settings = [
        EngineSettings(
            model=str(model),
            attention_backend=backend,
            dtype=dtype,
            max_model_len=positions + 256,
            max_num_seqs=1,
        )
        for backend in (None, "relay")
    ]
    answers: list[list[ModulesAnswer]] = [[], []]
    with ExitStack() as stack:
        status = stack.enter_context(console.status("starting two engines"))
        engines = [
            stack.enter_context(ModulesEngine(name, each, directory / f"{name}.log"))
            for name, each in zip(_NAMES, settings, strict=True)
        ]
        for engine in engines:
            engine.wait()
        for i, question in enumerate(workload.questions):
            text = "".join(workload.parts[number] for number in question.parts) + question.text
            rendered = store.render(question.prompt)
            assert rendered.plan is not None
            prompts: list[tuple[list[int], dict[str, Any] | None]] = [
                (tokenizer.encode(text), None),
                (rendered.token_ids, {EXTRA_ARG: rendered.plan.to_argument()}),
            ]
            turns = list(zip(engines, prompts, answers, strict=True))
            for engine, (token_ids, extra_args), of_engine in (
                turns if i % 2 == 0 else reversed(turns)
            ):
                wait_until_workers_sleep()
                status.update(f"{engine.name}: question {i + 1} of {len(workload.questions)}")
                of_engine.append(engine.answer(token_ids, extra_args, output_tokens))
        for engine in engines:
            engine.ask_to_stop()
    return answers


def _report(expected: Sequence[list[int]], answers: Sequence[ModulesAnswer]) -> ModulesReport:
    later = answers[len(answers) // 2 :]
    return ModulesReport(
        questions=len(answers),
        answers_right=sum(a.token_ids == e for a, e in zip(answers, expected, strict=True)),
        prompt_tokens=sum(answer.prompt_tokens for answer in later),
        cached_tokens=sum(answer.cached_tokens for answer in later),
        first_token_s=statistics.median(answer.first_token_s for answer in later),
    )


def _table(prefix: ModulesReport, modules: ModulesReport) -> Table:
    table = Table("", title="The same parts and questions", caption="the later half of questions")
    for name in _NAMES:
        table.add_column(name, justify="right")
    reports = (prefix, modules)
    table.add_row("answers right", *(f"{r.answers_right} / {r.questions}" for r in reports))
    table.add_row(
        "prompt tokens cached", *(f"{r.cached_tokens / r.prompt_tokens:.1%}" for r in reports)
    )
    table.add_row("first token", *(f"{r.first_token_s * 1e3:.1f} ms" for r in reports))
    return table

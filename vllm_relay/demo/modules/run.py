# SPDX-License-Identifier: Apache-2.0
"""`vllm-relay demo --modules`: questions to parts of a document, in any combination.

Stock vLLM gets the parts as plain text, in the order of the question, and reuses what prompts begin
with; relay imports them as modules. Both answer one question at a time, in turn.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from vllm_relay.demo.engine import EngineSettings
from vllm_relay.demo.engine_process import in_turn, running_engines, wait_until_workers_sleep
from vllm_relay.demo.modules.engine import BLOCK_SIZE_TOKENS, ModulesAnswer, ModulesEngine
from vllm_relay.demo.modules.workload import PartsWorkload, parts_workload
from vllm_relay.demo.options import DemoOptions
from vllm_relay.demo.recall_model import build_recall_model
from vllm_relay.demo.workload import check_at_least
from vllm_relay.modules.prompt.plan import EXTRA_ARG
from vllm_relay.modules.prompt.schema_store import SchemaStore

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


def run_modules_demo(options: DemoOptions, *, num_questions: int, output_tokens: int) -> int:
    """Run the comparison, print a table and return the exit status.

    Args:
        num_questions: from 4 on.
        output_tokens: length of every answer, 2 to 8.

    Returns:
        0, or 1 if an engine failed or answers are wrong; the reason is printed.

    Raises:
        CommandLineError: a setting is out of its range.
    """
    reports = options.run(lambda: _run(options, num_questions, output_tokens))
    if reports is None:
        return 1
    prefix, modules = reports
    options.console.print(_table(prefix, modules))
    options.write_json(
        {
            "dtype": options.dtype,
            "seed": options.seed,
            "prefix_cache": asdict(prefix),
            "modules": asdict(modules),
        }
    )
    return options.conclude(
        [
            f"{name}: {wrong} of {report.questions} answers are wrong"
            for name, report in zip(_NAMES, reports, strict=True)
            if (wrong := report.questions - report.answers_right)
        ],
        None,
        next_step="vllm-relay modules check SCHEMA.xml, for a schema of yours",
    )


def _run(options: DemoOptions, num_questions: int, output_tokens: int) -> list[ModulesReport]:
    check_at_least(4, num_questions=num_questions)
    with options.folder() as folder:
        workload = parts_workload(
            num_parts=NUM_PARTS,
            part_tokens=PART_TOKENS,
            parts_per_question=PARTS_PER_QUESTION,
            num_questions=num_questions,
            output_tokens=output_tokens,
            seed=options.seed,
        )
        model = build_recall_model(folder / "recall-model", dtype=options.dtype, seed=options.seed)
        options.console.print(
            f"The recall model in {options.dtype}: {num_questions} questions, each to "
            f"{PARTS_PER_QUESTION} of {NUM_PARTS} parts of {PART_TOKENS:,} tokens, one at a "
            "time."
        )
        tokenizer = AutoTokenizer.from_pretrained(model)
        store = SchemaStore(tokenizer, block_size=BLOCK_SIZE_TOKENS)
        settings = EngineSettings(
            model=str(model),
            attention_backend=None,
            dtype=options.dtype,
            max_model_len=store.add(workload.schema).root.size_tokens + 256,
            max_num_seqs=1,
        )
        answers = _answers(
            workload, tokenizer, store, settings, output_tokens, folder, options.console
        )
    expected = [
        tokenizer.encode(each.answer, add_special_tokens=False) for each in workload.questions
    ]
    return [_report(expected, each) for each in answers]


def _answers(
    workload: PartsWorkload,
    tokenizer: PreTrainedTokenizerBase,
    store: SchemaStore,
    settings: EngineSettings,
    output_tokens: int,
    folder: Path,
    console: Console,
) -> list[list[ModulesAnswer]]:
    """Of both engines. Which one begins changes with every question."""
    both_settings = [settings, replace(settings, attention_backend="relay")]
    answers: list[list[ModulesAnswer]] = [[], []]
    with (
        console.status("starting two engines") as status,
        running_engines(
            ModulesEngine(name, each, folder / f"{name}.log")
            for name, each in zip(_NAMES, both_settings, strict=True)
        ) as engines,
    ):
        for i, question in enumerate(workload.questions):
            text = "".join(workload.parts[number] for number in question.parts) + question.text
            rendered = store.render(question.prompt)
            assert rendered.plan is not None
            prompts: list[tuple[list[int], dict[str, Any] | None]] = [
                (tokenizer.encode(text), None),
                (rendered.token_ids, {EXTRA_ARG: rendered.plan.to_argument()}),
            ]
            for engine, (token_ids, extra_args), of_engine in in_turn(
                zip(engines, prompts, answers, strict=True), i
            ):
                wait_until_workers_sleep()
                status.update(f"{engine.name}: question {i + 1} of {len(workload.questions)}")
                of_engine.append(engine.answer(token_ids, extra_args, output_tokens))
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

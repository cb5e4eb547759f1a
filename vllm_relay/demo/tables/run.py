# SPDX-License-Identifier: Apache-2.0
"""`vllm-relay demo --tables`: a table asked row by row and with `llm_map`, answers checked.

One engine answers both, vLLM as it is: what differs is which prompts it gets, and in which order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from vllm_relay.demo.engine import EngineSettings
from vllm_relay.demo.engine_process import in_turn, running_engines
from vllm_relay.demo.options import DemoOptions
from vllm_relay.demo.recall_model import build_recall_model
from vllm_relay.demo.tables.engine import (
    BLOCK_SIZE_TOKENS,
    NUM_BLOCKS,
    TableAnswers,
    TablesEngine,
    Way,
)
from vllm_relay.demo.tables.workload import TablesWorkload, tables_workload

_WAYS: dict[Way, str] = {"row_by_row": "row by row", "llm_map": "llm_map"}
_MAX_MODEL_LEN_TOKENS = 1024
_MAX_NUM_SEQS = 12
_WARM_UP_ROWS = 12


@dataclass(frozen=True)
class WayReport:
    """One way of asking, over all questions.

    Attributes:
        answers: one for each row and question.
        computed_tokens: of prompts and answers, all that were not in the prefix cache.
    """

    answers: int
    answers_right: int
    prompts: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    seconds: float
    planning_seconds: float

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens


def run_tables_demo(options: DemoOptions, *, num_rows: int) -> int:
    """Run the comparison, print a table and return the exit status.

    Args:
        num_rows: of the table, from 1 on.

    Returns:
        0, or 1 if a setting is out of its range, the engine failed or answers are wrong; the reason
        is printed.
    """
    reports = options.run(lambda: _run(options, num_rows))
    if reports is None:
        return 1
    options.console.print(_table(reports))
    options.write_json(
        {
            "dtype": options.dtype,
            "seed": options.seed,
            "num_rows": num_rows,
            **{way: {**asdict(each), "hit_rate": each.hit_rate} for way, each in reports.items()},
        }
    )
    rows, ours = reports["row_by_row"], reports["llm_map"]
    return options.conclude(
        [
            f"{_WAYS[way]}: {wrong} of {report.answers} answers are wrong"
            for way, report in reports.items()
            if (wrong := report.answers - report.answers_right)
        ],
        f"llm_map took {ours.seconds:.2f} s for what took {rows.seconds:.2f} s row by row: "
        f"{rows.seconds / ours.seconds:.2f} times as fast.",
    )


def _run(options: DemoOptions, num_rows: int) -> dict[Way, WayReport]:
    workload = tables_workload(num_rows=num_rows, seed=options.seed)
    with options.folder() as folder:
        model = build_recall_model(folder / "recall-model", dtype=options.dtype, seed=options.seed)
        [choices] = [len(c) for each in workload.questions if (c := each.question.output.choices)]
        options.console.print(
            f"The recall model in {options.dtype}: {len(workload.questions)} questions to each of "
            f"{num_rows:,} rows, one of them with {choices} choices; the KV cache holds "
            f"{NUM_BLOCKS * BLOCK_SIZE_TOKENS:,} tokens."
        )
        settings = EngineSettings(
            model=str(model),
            attention_backend=None,
            dtype=options.dtype,
            max_model_len=_MAX_MODEL_LEN_TOKENS,
            max_num_seqs=_MAX_NUM_SEQS,
        )
        answers = _answers(workload, settings, folder, options.console)
    return {way: _report(workload, of_way) for way, of_way in answers.items()}


def _answers(
    workload: TablesWorkload, settings: EngineSettings, folder: Path, console: Console
) -> dict[Way, list[TableAnswers]]:
    """To each question. Which way begins changes with every question."""
    answers: dict[Way, list[TableAnswers]] = {way: [] for way in _WAYS}
    with (
        console.status("starting vLLM") as status,
        running_engines([TablesEngine("vLLM", settings, folder / "vllm.log")]) as [engine],
    ):
        status.update("warming up")
        few = {name: cells[:_WARM_UP_ROWS] for name, cells in workload.columns.items()}
        for question in workload.questions:
            for way in _WAYS:
                engine.ask(way, few, question.question)
        for i, question in enumerate(workload.questions):
            for way in in_turn(_WAYS, i):
                status.update(f"{_WAYS[way]}: question {i + 1} of {len(workload.questions)}")
                answers[way].append(engine.ask(way, workload.columns, question.question))
    return answers


def _report(workload: TablesWorkload, answers: Sequence[TableAnswers]) -> WayReport:
    right = [
        text == expected
        for question, each in zip(workload.questions, answers, strict=True)
        for text, expected in zip(each.texts, question.answers, strict=True)
    ]
    prompt_tokens = sum(each.prompt_tokens for each in answers)
    cached_tokens = sum(each.cached_tokens for each in answers)
    return WayReport(
        answers=len(right),
        answers_right=sum(right),
        prompts=sum(each.prompts for each in answers),
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        computed_tokens=prompt_tokens - cached_tokens + sum(each.output_tokens for each in answers),
        seconds=sum(each.seconds for each in answers),
        planning_seconds=sum(each.planning_seconds for each in answers),
    )


def _table(reports: dict[Way, WayReport]) -> Table:
    rows, ours = reports["row_by_row"], reports["llm_map"]
    both = rows, ours
    table = Table("", title="The same questions to the same table, asked")
    table.add_column("row by row", justify="right")
    table.add_column("with llm_map", justify="right")
    table.add_column("llm_map / row by row", justify="right")
    table.add_row("answers right", *(f"{r.answers_right:,} / {r.answers:,}" for r in both))
    for name, of_rows, of_ours in [
        ("prompts run", rows.prompts, ours.prompts),
        ("prompt tokens", rows.prompt_tokens, ours.prompt_tokens),
        ("tokens computed", rows.computed_tokens, ours.computed_tokens),
    ]:
        table.add_row(name, f"{of_rows:,}", f"{of_ours:,}", f"{of_ours / of_rows:.3g}")
    table.add_row("prefix-cache hit rate", *(f"{r.hit_rate:.1%}" for r in both))
    table.add_row("planning time", *(f"{r.planning_seconds:.2f} s" for r in both))
    table.add_row(
        "job time", *(f"{r.seconds:.2f} s" for r in both), f"{ours.seconds / rows.seconds:.3g}"
    )
    return table

# SPDX-License-Identifier: Apache-2.0
"""`vllm-relay demo --tables`: a table asked row by row and with `llm_map`, answers checked.

One engine answers both, vLLM as it is: what differs is which prompts it gets, and in which order.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from vllm_relay.arguments import check_writable
from vllm_relay.demo.engine import EngineSettings
from vllm_relay.demo.engine_process import EngineError
from vllm_relay.demo.recall_model import build_recall_model
from vllm_relay.demo.tables_engine import (
    BLOCK_SIZE_TOKENS,
    NUM_BLOCKS,
    TableAnswers,
    TablesEngine,
    Way,
)
from vllm_relay.demo.tables_workload import TablesWorkload, tables_workload

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


def run_tables_demo(
    *,
    num_rows: int,
    dtype: str = "bfloat16",
    seed: int = 0,
    keep: Path | None = None,
    json_path: Path | None = None,
    console: Console | None = None,
) -> int:
    """Run the comparison, print a table and return the exit status.

    Args:
        num_rows: of the table, from 1 on.
        dtype: of the weights, the activations and the KV cache.
        seed: the same seed gives the same model and table.
        keep: where the recall model and the log are kept; a temporary directory if None.
        json_path: where all numbers are written as JSON.
        console: where to print; the standard output if None.

    Returns:
        0, or 1 if a setting is out of its range, the engine failed or answers are wrong; the reason
        is printed.
    """
    console = console or Console()
    with ExitStack() as stack:
        directory = keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        try:
            check_writable("--json", json_path)
            workload = tables_workload(num_rows=num_rows, seed=seed)
            directory.mkdir(parents=True, exist_ok=True)
            model = build_recall_model(directory / "recall-model", dtype=dtype, seed=seed)
            [choices] = [
                len(c) for each in workload.questions if (c := each.question.output.choices)
            ]
            console.print(
                f"The recall model in {dtype}: {len(workload.questions)} questions to each of "
                f"{num_rows:,} rows, one of them with {choices} choices; the KV cache holds "
                f"{NUM_BLOCKS * BLOCK_SIZE_TOKENS:,} tokens."
            )
            answers = _ask(workload, str(model), dtype, directory, console)
        except (EngineError, OSError, ValueError) as error:
            console.print(str(error), style="red", markup=False, highlight=False)
            return 1
    reports = {way: _report(workload, answers[way]) for way in _WAYS}
    console.print(_table(reports))
    if json_path is not None:
        numbers = {
            way: {**asdict(each), "hit_rate": each.hit_rate} for way, each in reports.items()
        }
        settings = {"dtype": dtype, "seed": seed, "num_rows": num_rows}
        json_path.write_text(json.dumps({**settings, **numbers}, indent=2) + "\n")
    return _conclude(reports, console)


def _ask(
    workload: TablesWorkload, model: str, dtype: str, directory: Path, console: Console
) -> dict[Way, list[TableAnswers]]:
    """The answers to each question. Which way begins changes with every question."""
    settings = EngineSettings(
        model=model,
        attention_backend=None,
        dtype=dtype,
        max_model_len=_MAX_MODEL_LEN_TOKENS,
        max_num_seqs=_MAX_NUM_SEQS,
    )
    answers: dict[Way, list[TableAnswers]] = {way: [] for way in _WAYS}
    with ExitStack() as stack:
        status = stack.enter_context(console.status("starting vLLM"))
        engine = stack.enter_context(TablesEngine("vLLM", settings, directory / "vllm.log"))
        engine.wait()
        status.update("warming up")
        few = {name: cells[:_WARM_UP_ROWS] for name, cells in workload.columns.items()}
        for question in workload.questions:
            for way in _WAYS:
                engine.ask(way, few, question.question)
        for i, question in enumerate(workload.questions):
            for way in list(_WAYS) if i % 2 == 0 else reversed(_WAYS):
                status.update(f"{_WAYS[way]}: question {i + 1} of {len(workload.questions)}")
                answers[way].append(engine.ask(way, workload.columns, question.question))
        engine.ask_to_stop()
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


def _conclude(reports: dict[Way, WayReport], console: Console) -> int:
    wrong = {
        way: report.answers - report.answers_right
        for way, report in reports.items()
        if report.answers_right < report.answers
    }
    for way, count in wrong.items():
        console.print(
            f"{_WAYS[way]}: {count} of {reports[way].answers} answers are wrong",
            style="red",
            highlight=False,
        )
    if wrong:
        return 1
    rows, ours = reports["row_by_row"], reports["llm_map"]
    console.print(
        f"llm_map took {ours.seconds:.2f} s for what took {rows.seconds:.2f} s row by row: "
        f"{rows.seconds / ours.seconds:.2f} times as fast.",
        style="green",
        highlight=False,
    )
    return 0

# SPDX-License-Identifier: Apache-2.0
"""`vllm-relay demo --tables`: a table asked row by row and with `llm_map`, answers checked.

One engine answers both, vLLM as it is: what differs is which prompts it gets, and in which order.
With `--replicas` several share this machine and are asked with `llm_map` too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from vllm_relay.demo.engine import EngineSettings
from vllm_relay.demo.engine_process import in_turn, running_engines, wait_until_workers_sleep
from vllm_relay.demo.options import DemoOptions
from vllm_relay.demo.recall_model import build_recall_model
from vllm_relay.demo.tables.engine import (
    BLOCK_SIZE_TOKENS,
    NUM_BLOCKS,
    ReplicaSettings,
    TableAnswers,
    TablesEngine,
    Way,
)
from vllm_relay.demo.tables.workload import TablesWorkload, tables_workload

_WAYS: dict[Way, str] = {
    "row_by_row": "row by row",
    "llm_map": "llm_map",
    "replicas": "llm_map with replicas",
}
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


def run_tables_demo(options: DemoOptions, *, num_rows: int, num_replicas: int | None = None) -> int:
    """Run the comparison, print a table and return the exit status.

    Args:
        num_rows: of the table, from 1 on.
        num_replicas: that Ray starts, from 2 on; None for one engine only.

    Returns:
        0, or 1 if the engine failed or answers are wrong; the reason is printed.

    Raises:
        CommandLineError: a setting is out of its range.
    """
    reports = options.run(lambda: _run(options, num_rows, num_replicas))
    if reports is None:
        return 1
    options.console.print(_table(reports))
    options.write_json(
        {
            "dtype": options.dtype,
            "seed": options.seed,
            "num_rows": num_rows,
            "num_replicas": num_replicas,
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
        next_step="vllm-relay sql TABLE.csv --model MODEL, for a table of yours",
    )


def _run(options: DemoOptions, num_rows: int, num_replicas: int | None) -> dict[Way, WayReport]:
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
        warm_up = tables_workload(num_rows=_WARM_UP_ROWS, seed=options.seed + 1).columns
        engines: dict[str, EngineSettings] = {"vllm.log": settings}
        if num_replicas is not None:
            of_each = ReplicaSettings(**asdict(settings), num_replicas=num_replicas)
            engines["replicas.log"] = of_each
        answers = _answers(workload, warm_up, engines, folder, options.console)
    return {way: _report(workload, of_way) for way, of_way in answers.items()}


def _answers(
    workload: TablesWorkload,
    warm_up: dict[str, list[str]],
    settings: Mapping[str, EngineSettings],
    folder: Path,
    console: Console,
) -> dict[Way, list[TableAnswers]]:
    """To each question. Which way begins changes with every question.

    Args:
        warm_up: columns of another table.
        settings: of one vLLM, and of replicas if there are any, by the names of their logs.
    """
    with (
        console.status("starting vLLM") as status,
        running_engines(
            TablesEngine(log.partition(".")[0], each, folder / log)
            for log, each in settings.items()
        ) as [one, *several],
    ):
        asked: dict[Way, TablesEngine] = {"row_by_row": one, "llm_map": one}
        for engine in several:
            asked["replicas"] = engine
        answers: dict[Way, list[TableAnswers]] = {way: [] for way in asked}
        status.update("warming up")
        for question in workload.questions:
            for way, engine in asked.items():
                engine.ask(way, warm_up, question.question)
        for i, question in enumerate(workload.questions):
            for way in in_turn(asked, i):
                status.update(f"{_WAYS[way]}: question {i + 1} of {len(workload.questions)}")
                wait_until_workers_sleep()
                answers[way].append(asked[way].ask(way, workload.columns, question.question))
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
    table = Table("", title="The same questions to the same table, asked")
    for way in reports:
        table.add_column(_WAYS[way], justify="right")
    table.add_column("llm_map / row by row", justify="right")
    every = reports.values()
    table.add_row("answers right", *(f"{r.answers_right:,} / {r.answers:,}" for r in every))
    for name, count in [
        ("prompts run", lambda report: report.prompts),
        ("prompt tokens", lambda report: report.prompt_tokens),
        ("tokens computed", lambda report: report.computed_tokens),
    ]:
        ratio = f"{count(ours) / count(rows):.3g}"
        table.add_row(name, *(f"{count(r):,}" for r in every), ratio)
    table.add_row("prefix-cache hit rate", *(f"{r.hit_rate:.1%}" for r in every))
    table.add_row("planning time", *(f"{r.planning_seconds:.2f} s" for r in every))
    ratio = f"{ours.seconds / rows.seconds:.3g}"
    table.add_row("job time", *(f"{r.seconds:.2f} s" for r in every), ratio)
    return table

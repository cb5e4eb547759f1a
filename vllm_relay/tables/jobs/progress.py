# SPDX-License-Identifier: Apache-2.0
"""How far a job is."""

from __future__ import annotations

import math
import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from vllm_relay.tables.jobs.estimates.estimate import JobReport

_LEAST_INTERVAL_S = 0.1


class JobProgress:
    """A bar on the standard error, with the time left, the hit rate and the tokens saved.

    Args:
        num_rows: of the job.
        show: None shows it on a terminal.
    """

    def __init__(self, num_rows: int, show: bool | None) -> None:
        self._console = Console(stderr=True)
        shown = sys.stderr.isatty() if show is None else show
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("rows, left"),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("{task.fields[figures]}"),
            console=self._console,
            disable=not shown,
            transient=True,
        )
        self._shown_s = -math.inf
        self._task: TaskID = self._progress.add_task("asking", total=num_rows, figures="")

    def __enter__(self) -> JobProgress:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def show(self, num_answered: int, report: JobReport) -> None:
        """Rows that have an answer or an error, and what the job took so far.

        It may be called often: the bar changes ten times a second at most.
        """
        now_s = time.monotonic()
        if now_s - self._shown_s < _LEAST_INTERVAL_S:
            return
        self._shown_s = now_s
        rate = report.cached_tokens / report.prompt_tokens if report.prompt_tokens else 0.0
        figures = (
            f"hit rate {rate:.0%}, {report.saved_tokens + report.cached_tokens:,} tokens saved"
        )
        if report.num_errors:
            figures += f", {report.num_errors:,} errors"
        self._progress.update(self._task, completed=num_answered, figures=figures)

# SPDX-License-Identifier: Apache-2.0
"""How far a command is and how long it still takes: a bar on the standard error of a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

Show: TypeAlias = Callable[[str, float], None]
"""Shows what is being done, and which part of the whole is done, 0 to 1."""


class TerminalProgress(Progress):
    """A bar that is gone when it ends; output that others read stays as it is.

    Args:
        done: how much is done, as numbers.
        figures: what follows the time that is left.
        show: None shows it on a terminal.
    """

    def __init__(
        self, done: ProgressColumn, *figures: ProgressColumn, show: bool | None = None
    ) -> None:
        super().__init__(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            done,
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=True),
            *figures,
            console=Console(stderr=True),
            disable=not (sys.stderr.isatty() if show is None else show),
            transient=True,
        )


@contextmanager
def showing_progress(what: str, show: bool | None = None) -> Iterator[Show]:
    """A bar as long as the block runs; without a part that is done it only moves.

    Args:
        what: is done first.
        show: None shows it on a terminal.

    Yields:
        What says how far it is; it may be called as often as one likes.
    """
    with TerminalProgress(TaskProgressColumn(), show=show) as progress:
        task = progress.add_task(what, total=None)

        def update(what: str, part_done: float) -> None:
            progress.update(task, description=what, total=1.0, completed=part_done)

        yield update

# SPDX-License-Identifier: Apache-2.0
"""An engine for actors that a test can watch from outside and make fail."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.support.waiting import wait_for
from tests.tables.fake_engine import FakeEngine
from vllm_relay.tables.engines.base import Completions, Prompt
from vllm_relay.tables.ordering.cached_tokens import BlockCache
from vllm_relay.tables.question import Question

ROWS = pa.table({"text": [f"group {number // 20} " * 30 + str(number) for number in range(200)]})


@dataclass
class Logged:
    """Prompts, with a line for each in a file; goes on after its end as they do."""

    prompts: Iterator[Prompt]
    log: Path

    def __iter__(self) -> Logged:
        return self

    def __next__(self) -> Prompt:
        prompt = next(self.prompts)
        with self.log.open("a") as file:
            file.write(f"{prompt.number}\n")
        return prompt


class LoggedEngine(FakeEngine):
    """Writes what it does to files of its process in `folder`."""

    folder: Path

    def log(self, what: str) -> Path:
        return self.folder / f"{os.getpid()}.{what}"

    def generate(self, prompts: Iterable[Prompt], question: Question) -> Completions:
        try:
            yield from super().generate(Logged(iter(prompts), self.log("taken")), question)
        finally:
            with self.log("aborted").open("a") as file:
                file.write(f"{self.num_aborted}\n")

    def close(self) -> None:
        self.log("closed").touch()


def open_logged(folder: Path, **options: Any) -> FakeEngine:
    engine = LoggedEngine(**{"cache": BlockCache(16, 1000), **options})
    engine.folder = folder
    engine.log("cores").write_text(
        os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "").replace(",", " ")
    )
    return engine


def open_unlike(folder: Path) -> FakeEngine:
    """One whose context has another length in each process: its number."""
    engine = open_logged(folder, max_model_len=os.getpid())
    engine.log("opened").touch()
    return engine


@dataclass
class FailsAt:
    """A step that fails in the process that is the first to be there.

    Attributes:
        folder: of all processes.
        step: number of the step.
        error: that is raised.
    """

    folder: Path
    step: int
    error: Exception

    def __call__(self, step: int) -> None:
        if step >= self.step:
            try:
                (self.folder / "failing").touch(exist_ok=False)
            except FileExistsError:
                return
            raise self.error


@dataclass
class WaitsFor:
    """Steps of all processes that wait until there are files. A process that waits has a file too,
    "PID.waits".

    Attributes:
        folder: of all processes.
        files: a pattern of names.
        count: of these.
        step: the first that waits.
    """

    folder: Path
    files: str
    count: int = 1
    step: int = 0

    def __call__(self, step: int) -> None:
        if step >= self.step:
            (self.folder / f"{os.getpid()}.waits").touch()
            wait_for(lambda: len(list(self.folder.glob(self.files))) >= self.count)


def logs(folder: Path, what: str) -> dict[int, list[int]]:
    """The numbers in the files of all processes, by process."""
    return {
        int(path.name.partition(".")[0]): list(map(int, path.read_text().split()))
        for path in sorted(folder.glob(f"*.{what}"))
    }

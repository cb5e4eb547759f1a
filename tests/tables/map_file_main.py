# SPDX-License-Identifier: Apache-2.0
"""Answers written to a file while a job runs, with a log of what was asked.

Usage: python -m tests.tables.map_file_main FOLDER NUM_ROWS BATCH_ROWS [HELD_AT]

Reads source.parquet, which is made if it is not there. Prints the most memory that the process had,
in bytes. With HELD_AT it is to be killed, and stands still when so many answers are in the log.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.tables.jobs.memory_main import peak_bytes
from tests.tables.recording_engine import RecordingEngine
from vllm_relay.tables import llm_map_file
from vllm_relay.tables.engines.base import Completions, Prompt
from vllm_relay.tables.question import Question

ROWS_PER_GROUP = 1000


def made_source(path: Path, num_rows: int) -> None:
    schema = pa.schema([("id", pa.int64()), ("kind", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        for begin in range(0, num_rows, ROWS_PER_GROUP):
            ids = range(begin, min(begin + ROWS_PER_GROUP, num_rows))
            kinds = [f"kind {number % 10}" for number in ids]
            writer.write_table(pa.table([list(ids), kinds], schema=schema))


class LoggingEngine(RecordingEngine):
    def __init__(self, log: Path, held_at: int | None) -> None:
        super().__init__(lambda row: f"number {row['id']}")
        self._log = log
        self._held_at = held_at
        self._num_logged = 0

    def generate(self, prompts: Iterable[Prompt], question: Question) -> Completions:
        with self._log.open("a") as log:
            for completion in super().generate(prompts, question):
                log.write(f"{completion.text}\n")
                log.flush()
                self.messages.clear()
                self._num_logged += 1
                if self._num_logged == self._held_at:
                    signal.pause()
                yield completion


def main(folder: str, num_rows: str, batch_rows: str, held_at: str = "") -> None:
    source = Path(folder, "source.parquet")
    if not source.exists():
        made_source(source, int(num_rows))
    llm_map_file(
        source,
        Path(folder, "answers.parquet"),
        "Which number is {id}?",
        ["id", "kind"],
        engine=LoggingEngine(Path(folder, "asked"), int(held_at) if held_at else None),
        checkpoint=Path(folder, "checkpoint"),
        batch_rows=int(batch_rows),
        show_progress=False,
    )
    print(peak_bytes())


if __name__ == "__main__":
    main(*sys.argv[1:])

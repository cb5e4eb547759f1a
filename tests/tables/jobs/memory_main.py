# SPDX-License-Identifier: Apache-2.0
"""A statement about a table of any size, with little memory for DuckDB.

Usage: python -m tests.tables.jobs.memory_main NUM_ROWS BUCKET_ROWS FOLDER

Prints what was asked, and the most memory that the process had, in bytes.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import duckdb

from tests.tables.fake_engine import FakeEngine
from vllm_relay.tables import JobOptions, connect
from vllm_relay.tables.engines.base import (
    Completion,
    Completions,
    Prompt,
)
from vllm_relay.tables.ordering.cached_tokens import BlockCache
from vllm_relay.tables.question import Question

DUCKDB_MEMORY_MB = 100


class InstantEngine(FakeEngine):
    def generate(self, prompts: Iterable[Prompt], question: Question) -> Completions:
        for prompt in prompts:
            yield Completion(prompt.number, "an answer of some words", "", 50, 0, 5)


def peak_bytes() -> int:
    # resource.getrusage counts what the parent had when it made this process
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def main(num_rows: str, bucket_rows: str, folder: str) -> None:
    connection = duckdb.connect(str(Path(folder, "data.duckdb")))
    connection.execute(f"SET memory_limit = '{DUCKDB_MEMORY_MB}MB'")
    connection.execute("SET threads = 1")
    connection.execute(f"SET temp_directory = '{folder}/spilled'")
    connection.execute(
        "CREATE TABLE t AS SELECT i AS id, md5((i % 1000)::VARCHAR) AS kind, "
        f"repeat(md5(i::VARCHAR), 8) AS review FROM range({num_rows}) AS numbers(i)"
    )
    options = JobOptions(
        order="fixed",
        bucket_rows=int(bucket_rows),
        checkpoint=Path(folder, "answers"),
        show_progress=False,
    )
    asking = "SELECT id, llm('What?', {id, kind, review}) AS answer FROM t"
    with connect(
        connection, engine=InstantEngine(cache=BlockCache(16)), options=options
    ) as database:
        result = database.sql(f"CREATE TABLE out AS {asking}")
        [estimated] = database.explain(asking).calls
    found = {
        "num_prompts": result.report.num_prompts,
        "num_known": estimated.estimate.num_known,
        "num_answers": connection.execute("SELECT count(answer) FROM out").fetchone(),
        "peak_bytes": peak_bytes(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

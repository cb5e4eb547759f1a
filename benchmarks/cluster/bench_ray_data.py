# SPDX-License-Identifier: Apache-2.0
"""A question to every row of a dataset of Ray Data: what the driver's memory grows by.

Rows are short, have 61 different texts and lie in Parquet files; a server in the driver's own
process says yes to everything. Nothing is sorted, answers are read batch by batch and counted.
"""

import os
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.support.formatting import Row
from benchmarks.support.options import argument_parser
from benchmarks.support.result import Goal, Result
from tests.tables.engines.server.fake_server import OTHER_MODEL, chat_answer, fake_server

ROWS_OF_A_FILE = 500_000
DIFFERENT_TEXTS = 61
_LOOK_EVERY_S = 0.2


class Memory:
    """The most that this process has for itself while a block runs."""

    def __enter__(self) -> "Memory":
        self._process, self._is_over = psutil.Process(), Event()
        self.most_bytes = self._own_bytes()
        self._thread = Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._is_over.wait(_LOOK_EVERY_S):
            self.most_bytes = max(self.most_bytes, self._own_bytes())

    def _own_bytes(self) -> int:
        found = self._process.memory_info()
        return found.rss - found.shared


def write_rows(folder: Path, count: int) -> None:
    for begin in range(0, count, ROWS_OF_A_FILE):
        numbers = np.arange(begin, min(begin + ROWS_OF_A_FILE, count))
        texts = [f"word {number}" for number in (numbers % DIFFERENT_TEXTS).tolist()]
        pq.write_table(pa.table({"number": numbers, "text": texts}), folder / f"{begin}.parquet")


def measure(count: int) -> Row:
    import ray

    from vllm_relay.tables.hosts.ray_data import llm_map

    with (
        tempfile.TemporaryDirectory(prefix="relay-bench-") as folder,
        fake_server(lambda body: chat_answer("yes"), model=OTHER_MODEL) as server,
    ):
        write_rows(Path(folder), count)
        began_s = time.perf_counter()
        with Memory() as memory:
            dataset = ray.data.read_parquet(folder)
            answered = llm_map(dataset, "Is {text} good?", engine=server.url, sort_by=None)
            right = 0
            for batch in answered.iter_batches(batch_format="pyarrow", batch_size=50_000):
                right += batch["answer"].to_pylist().count("yes")
        if right != count:
            raise SystemExit(f"{right} of {count} rows have their answer")
        return {
            "rows": count,
            "prompts": len(server.bodies),
            "s": time.perf_counter() - began_s,
            "driver's own memory, MB": memory.most_bytes / 1e6,
        }


def measure_all(options: Namespace) -> list[Row]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    settings: Any = {"include_dashboard": False, "object_store_memory": 1 << 30}
    ray.init("local", num_cpus=2, log_to_driver=False, **settings)
    try:
        return [measure(count) for count in options.rows]
    finally:
        ray.shutdown()


def main() -> None:
    parser = argument_parser(__doc__, rounds=1)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 10_000_000])
    options = parser.parse_args()
    if options.smoke:
        options.rows = [2_000]
    result = Result.begin(__file__, __doc__, options)
    rows = measure_all(options)
    result.add_table("Ray Data", rows)
    most_mb = rows[-1]["driver's own memory, MB"]
    goal = f"{options.rows[-1]} rows: the driver's own memory"
    result.add_goal(Goal(goal, most_mb, 1500, 500, True, "MB"))
    result.end(options)


if __name__ == "__main__":
    main()

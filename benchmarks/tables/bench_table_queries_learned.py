# SPDX-License-Identifier: Apache-2.0
"""Queries with llm() over tables, by a real model: time of the whole job.

What `bench_table_queries` measures, with SmolLM2-135M-Instruct: its answers are English, of the
lengths that it gives them, and its tokenizer is its own.

`--rows 50 --rounds 1 --dtype float32` computes some 220,000 tokens of prompts for the queries and
50,000 for EXPLAIN: about ten minutes where a second computes 500. `--queries Q2` measures one query
alone. Each is printed when it is done.
"""

import tempfile
from pathlib import Path

from benchmarks.support.result import Result
from benchmarks.tables.bench_table_queries import add_measured, options_of
from benchmarks.tables.database import Database
from vllm_relay.demo.smollm2.download import smollm2_folder


def main() -> None:
    options = options_of(__doc__, rows=400)
    result = Result.begin(__file__, __doc__, options)
    if options.smoke:  # that of `bench_table_queries` runs the same, with a smaller model
        return result.end(options)
    with tempfile.TemporaryDirectory(prefix="relay-bench-") as name:
        database = Database(Path(name), options.data, options.rows)
        add_measured(result, str(smollm2_folder()), "auto", database, options)
    result.end(options)


if __name__ == "__main__":
    main()

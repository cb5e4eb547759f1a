# SPDX-License-Identifier: Apache-2.0
"""Runs every benchmark, one after the other, and writes docs/benchmarks.md, and the pages that it
leads to with their plots.

`--smoke` only sees that they run, and `--render-only` writes the pages anew from the JSON files of
an earlier run.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support import vllm_processes

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
JSON_FOLDER = ROOT / "docs" / "benchmarks"
ROOMS = {
    "attention": [
        "bench_op",
        "bench_avx2",
        "bench_shared_phase",
        "bench_threads",
        "bench_random_batches",
        "bench_rollouts",
        "bench_planning",
        "bench_planning_gpu",
        "bench_error",
        "bench_low_parts",
        "bench_end_to_end",
    ],
    "scheduler": [
        "bench_scheduler",
        "bench_online",
        "bench_backlog",
        "bench_traces",
        "bench_serve",
        "bench_scheduling",
    ],
    "prefix_cache": [
        "bench_eviction",
        "bench_predictor",
    ],
    "modules": [
        "bench_modules",
    ],
    "tables": [
        "bench_tables",
        "bench_table_queries",
        "bench_table_queries_learned",
        "bench_table_rivals",
        "bench_semantic_operators",
    ],
    "cluster": [
        "bench_replicas",
        "bench_replica_seeds",
        "bench_bucketing",
        "bench_real_replicas",
        "bench_replica_index",
        "bench_ray_data",
    ],
    "sparse": [
        "bench_index_build",
        "bench_key_index",
        "bench_model_heads",
        "bench_real_heads",
        "bench_planner",
        "bench_sparse_layer",
        "bench_storage",
        "bench_open_context",
    ],
    "long_context": [
        "bench_long_context_quality",
        "bench_long_context_english",
        "bench_long_context_capacity",
        "bench_long_context_decode",
        "bench_step_parts",
        "bench_long_context_short",
    ],
    "page": [
        "bench_page",
        "bench_feed",
    ],
}
"""Folders and their benchmarks, in the order of the page."""
MODULES = {name: f"benchmarks.{room}.{name}" for room, names in ROOMS.items() for name in names}


def run(name: str, json_path: Path, arguments: list[str]) -> bool:
    command = [sys.executable, "-m", MODULES[name], "--json", str(json_path), *arguments]
    print(f"\n=== {name} {' '.join(arguments)}", flush=True)
    began_s = time.monotonic()
    if "--smoke" in arguments:
        done = vllm_processes.run_module("benchmarks.smoke_main", command[2:], {})
        print(done.stdout, done.stderr, sep="", flush=True)
        status = done.returncode
    else:
        status = subprocess.run(command, cwd=ROOT).returncode
    print(f"--- {name}: exit status {status}, {time.monotonic() - began_s:.0f} s", flush=True)
    return status == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny shapes; writes no pages")
    parser.add_argument("--only", nargs="+", choices=MODULES, default=list(MODULES), metavar="NAME")
    parser.add_argument("--render-only", action="store_true", help="run nothing")
    parser.add_argument("--json-folder", type=Path, default=JSON_FOLDER, help="(%(default)s)")
    parser.add_argument("--page", type=Path, default=PAGE, help="(%(default)s)")
    options = parser.parse_args()
    if options.smoke:
        os.environ["OPENBLAS_NUM_THREADS"] = "1"  # no thread when numpy is imported
        vllm_processes.fork_server()
        with tempfile.TemporaryDirectory() as folder:
            failed = [n for n in options.only if not run(n, Path(folder, f"{n}.json"), ["--smoke"])]
            for path in sorted(Path(folder).iterdir()):
                json.loads(path.read_text())
    else:
        from benchmarks.report import load_results, write_pages

        names = () if options.render_only else options.only
        failed = [n for n in names if not run(n, options.json_folder / f"{n}.json", [])]
        found = load_results(options.json_folder, MODULES)
        write_pages(found, options.page, options.json_folder, ROOMS)
        print(f"\nwrote {options.page}")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

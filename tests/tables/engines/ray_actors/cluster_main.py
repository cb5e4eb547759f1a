# SPDX-License-Identifier: Apache-2.0
"""A job on a cluster of two machines, one of which goes, for test_cluster.py.

Usage: python -m tests.tables.engines.ray_actors.cluster_main FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster

from tests.tables.engines.ray_actors.fake_replica import ROWS, logs, open_logged, wait_for
from vllm_relay.tables import llm_map
from vllm_relay.tables.engines.ray_actors.starting import start_actors


def main(folder: str) -> None:
    node: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    other = cluster.add_node(**node)
    os.environ["RAY_ADDRESS"] = cluster.address
    options: dict[str, Any] = {"step_s": 0.4, "max_running": 4}
    engine = start_actors(partial(open_logged, Path(folder), **options), 2)

    def end_other() -> None:
        wait_for(lambda: sum(map(len, logs(Path(folder), "taken").values())) > 60)
        [raylet] = other.all_processes["raylet"]
        workers = psutil.Process(raylet.process.pid).children(recursive=True)
        cluster.remove_node(other, allow_graceful=False)
        # with the machine all of its processes go, and not when they notice
        for worker in workers:
            with suppress(psutil.NoSuchProcess):
                worker.kill()

    ending = Thread(target=end_other)
    ending.start()
    result = llm_map(ROWS, "Which {text}?", engine=engine, show_progress=False)
    ending.join()
    found = {
        "num_nodes": len(ray.nodes()),
        "values": result.values.to_pylist(),
        "errors": result.errors,
        "output_tokens": result.report.output_tokens,
    }
    engine.close()
    found["is_connected"] = ray.is_initialized()
    cluster.shutdown()
    Path(folder, "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

# SPDX-License-Identifier: Apache-2.0
"""A soak of one engine of long contexts: random requests about the contexts of a folder.

Usage: python -m tests.long_context.soak_main MODEL FOLDER OUTPUT.json SECONDS SEED

MODEL is what `build_recall_model` writes. OUTPUT.json holds the ids of the contexts that an earlier
run over the same folder has stored, if there was one, and then counts and ids of this one.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from tests.long_context.soak import Soak, start_engine


def soak(model: str, folder: Path, seconds: float, seed: int, stored: list[str]) -> dict[str, Any]:
    run = Soak(start_engine(model, folder), folder, seed)
    end_s = time.monotonic() + seconds
    found = run.ask_about_contexts(stored)
    run.run_while(lambda: time.monotonic() < end_s)
    run.check_nothing_is_left()
    metrics = {m.name: m.value for m in run.engine.get_metrics() if hasattr(m, "value")}
    run.counts["preempted"] = int(metrics["vllm:num_preemptions"])
    left = [each.context_id for each in run.contexts() if each.state == "stored"]
    return {
        "counts": {**run.counts, "found": found},
        "wrong": run.wrong,
        "stored": left,
    }


def main() -> None:
    model, folder, output_path, seconds, seed = sys.argv[1:]
    output = Path(output_path)
    stored = json.loads(output.read_text())["stored"] if output.exists() else []
    result = soak(model, Path(folder), float(seconds), int(seed), stored)
    output.write_text(json.dumps(result))


if __name__ == "__main__":
    main()

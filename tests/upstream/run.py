# SPDX-License-Identifier: Apache-2.0
"""Run vLLM's own tests of its schedulers, once as they are and once with relay's schedulers.

They are those of the vLLM that is imported, from the source archive of its release. What failed,
and why, stays in build/upstream-tests.

Usage: .venv/bin/python tests/upstream/run.py
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from differences import DIFFERENT, FILES, FIXTURES, MODELS, contradictions, left_out

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
OUTPUT = ROOT / "build" / "upstream-tests"
TIMEOUT_S = 600
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


def main() -> None:
    started_s = time.monotonic()
    version = vllm_version()
    fetched = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "vllm_source.py"), version],
        stdout=subprocess.PIPE,
        text=True,
    )
    if fetched.returncode:
        raise SystemExit(fetched.returncode)
    tests = Path(fetched.stdout.strip()) / "tests"
    not_run = left_out(".".join(version.split(".")[:2]))
    models = prepare_output(not_run)
    stock = start("stock", tests, models)
    relay = start("relay", tests, models, "--relay-schedulers")
    outcomes = {"vLLM's": finish("stock", stock), "relay's": finish("relay", relay)}
    for whose, found in outcomes.items():
        counts = ", ".join(
            f"{n} {outcome}" for outcome, n in sorted(Counter(found.values()).items())
        )
        print(f"{version} with {whose} schedulers: {counts}")
    print(f"{len(not_run)} test functions left out, {len(DIFFERENT)} differ with a reason:")
    for test, reason in DIFFERENT.items():
        print(f"  {test}: {reason}")
    print(f"in {time.monotonic() - started_s:.0f} s; logs are in {OUTPUT}")
    if found := contradictions(outcomes["vLLM's"], outcomes["relay's"], DIFFERENT):
        raise SystemExit("\n".join(["", "not as tests/upstream/differences.py says:", *found]))


def vllm_version() -> str:
    """Of the vLLM that tests import, without what follows the release."""
    code = "import vllm; print(vllm.__version__)"
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=HERE, check=True
    )
    return done.stdout.split()[-1].partition("+")[0]


def prepare_output(not_run: Iterable[str]) -> Path:
    """Empty the folder of the logs; returns the one in which the models lie that tests name."""
    shutil.rmtree(OUTPUT, ignore_errors=True)
    models = OUTPUT / "models"
    for name, config in MODELS.items():
        folder = models / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))
    (OUTPUT / "left_out.json").write_text(json.dumps(sorted(not_run)))
    return models


def start(name: str, tests: Path, models: Path, *options: str) -> subprocess.Popen[bytes]:
    """Run the tests with the models as the current folder, which they then find by their names."""
    command = [sys.executable, "-m", "pytest", "-p", "relay_schedulers", "-p", "no:cacheprovider"]
    command += ["-q", "-ra", "-c", os.devnull, "--rootdir", str(tests), "--noconftest"]
    command += ["--outcomes", str(outcomes_path(name)), *options]
    command += ["--left-out", str(OUTPUT / "left_out.json")]
    command += [each for module in FIXTURES for each in ("--fixtures-of", module)]
    # vLLM's package `tests` before any other of that name
    paths = [str(tests), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    with (OUTPUT / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [*command, *(str(tests / file) for file in FILES)],
            cwd=models,
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)},
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def finish(name: str, process: subprocess.Popen[bytes]) -> dict[str, str]:
    """The outcome of every test."""
    try:
        process.wait(TIMEOUT_S)
    finally:
        process.kill()
    if process.returncode not in (0, 1):  # all passed, some failed
        log = (OUTPUT / f"{name}.log").read_text()
        raise SystemExit(f"{log}\nthe tests were not run: see above")
    outcomes: dict[str, str] = json.loads(outcomes_path(name).read_text())
    return outcomes


def outcomes_path(name: str) -> Path:
    return OUTPUT / f"{name}.json"


if __name__ == "__main__":
    main()

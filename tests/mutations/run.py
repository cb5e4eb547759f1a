# SPDX-License-Identifier: Apache-2.0
"""Whether the tests notice mistakes: each of `table.py` is made in a copy of the sources, and the
tests beside it must fail there.

Usage: python -m tests.mutations.run [PART OF A PATH...]

Needs a built checkout, whose objects the copy takes over. Ends with status 1 if a mistake was not
noticed, if what is to be replaced does not occur exactly once, or if a mutated kernel does not
compile.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.mutations.table import MUTATIONS, Mutation

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300
FAILED = 1  # pytest's status where tests failed; others are about pytest itself


def copy_sources(folder: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    for extension in (ROOT / "vllm_relay").glob("_C*.so"):
        shutil.copy2(extension, folder / "vllm_relay")
    if (ROOT / "build").is_dir():
        shutil.copytree(ROOT / "build", folder / "build")


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def build(folder: Path) -> str:
    """What went wrong, or ""."""
    built = run(folder, "setup.py", "-q", "build_ext", "--inplace")
    return built.stderr[-2000:] if built.returncode else ""


def result_of(mutation: Mutation, folder: Path) -> str:
    """ "caught", or what happened instead."""
    path = folder / mutation.path
    source = path.read_text()
    if source.count(mutation.old) != 1:
        return f"{mutation.old!r} occurs {source.count(mutation.old)} times, expected once"
    native = mutation.path.startswith("csrc/")
    path.write_text(source.replace(mutation.old, mutation.new))
    try:
        if native and (problem := build(folder)):
            return f"does not compile: {problem}"
        tests = [f"tests/{each}" for each in mutation.tests]
        done = run(folder, "-m", "pytest", "-n", "0", "-x", "-q", "-p", "no:cacheprovider", *tests)
    except subprocess.TimeoutExpired:
        return f"nothing failed within {TIMEOUT_S} s"
    finally:
        path.write_text(source)
        if native:
            build(folder)
    if done.returncode == FAILED:
        return "caught"
    return "survived" if done.returncode == 0 else f"pytest did not run: {done.stdout[-2000:]}"


def main(parts: list[str]) -> int:
    chosen = [each for each in MUTATIONS if not parts or any(part in each.path for part in parts)]
    num_caught = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_sources(folder)
        if any(each.path.startswith("csrc/") for each in chosen) and (problem := build(folder)):
            raise SystemExit(f"the sources do not compile as they are: {problem}")
        for mutation in chosen:
            started_s = time.monotonic()
            result = result_of(mutation, folder)
            num_caught += result == "caught"
            print(f"{time.monotonic() - started_s:6.1f} s  {mutation.path}: {result}", flush=True)
            if result != "caught":
                print(f"          {mutation.old!r} -> {mutation.new!r}", flush=True)
    print(f"{num_caught} of {len(chosen)} were caught")
    return int(num_caught < len(chosen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

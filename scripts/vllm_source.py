# SPDX-License-Identifier: Apache-2.0
"""Fetch the source archive of a vLLM release: its Python sources and its own tests.

Kept below the virtual environment this runs in, as ``vllm-source/<version>``:

- ``sources/vllm``: the package, without anything compiled
- ``tests/tests``: vLLM's tests, apart from it so that they find the vLLM that is installed

Nothing is built, and vLLM is not installed or changed.

Usage: .venv/bin/python scripts/vllm_source.py VERSION     prints the folder
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

# what setup.py of vLLM imports to tell its metadata, which pip wants before it hands an archive out
METADATA_NEEDS = [
    "cmake",
    "jinja2",
    "ninja",
    "packaging",
    "setuptools",
    "setuptools_rust",
    "setuptools_scm",
    "wheel",
]
LOG_TAIL_LINES = 20


def vllm_source(version: str) -> Path:
    """The folder with the sources of a release; fetched first where it is not there yet.

    Raises:
        SystemExit: the version is malformed, or the package index has no archive of it.
    """
    if not re.fullmatch(r"\d+\.\d+\.\d+(\.?(post|rc)\d+)?", version):
        raise SystemExit(
            f"vllm_source: {version!r} is not a release of vLLM: give one such as 0.32.0"
        )
    folder = Path(sys.prefix) / "vllm-source" / version
    if folder.exists():
        return folder
    folder.parent.mkdir(exist_ok=True)
    # beside it, so that it is moved in one piece or not at all
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{version}-") as work:
        archive = download(version, Path(work))
        unpacked = unpack(archive, Path(work) / "unpacked")
        unpacked.replace(folder)
    return folder


def download(version: str, work: Path) -> Path:
    """The source archive, put into `work`."""
    tools = work / "tools"
    pip = [sys.executable, "-m", "pip", "--quiet", "--no-input", "--disable-pip-version-check"]
    run([*pip, "install", "--target", str(tools), *METADATA_NEEDS])
    run(
        [*pip, "download", "--no-deps", "--no-build-isolation", "--no-binary", "vllm"]
        + ["--dest", str(work), f"vllm=={version}"],
        # no device: an extension to build is not looked for. Without the override the archive says
        # "+empty" after its version, and pip refuses what it did not ask for
        VLLM_TARGET_DEVICE="empty",
        VLLM_VERSION_OVERRIDE=version,
        PYTHONPATH=str(tools),
        PATH=f"{tools / 'bin'}{os.pathsep}{os.environ['PATH']}",
    )
    archives = list(work.glob("vllm-*.tar.gz"))
    if len(archives) != 1:
        raise SystemExit(f"vllm_source: the package index has no source archive of vLLM {version}")
    return archives[0]


def unpack(archive: Path, folder: Path) -> Path:
    """Put the package and the tests of an archive into `folder`, and returns it."""
    with tarfile.open(archive) as tar:
        tar.extractall(folder / "all", filter="data")
    [root] = (folder / "all").iterdir()
    for part, parent in (("vllm", "sources"), ("tests", "tests")):
        if not (root / part).is_dir():
            raise SystemExit(f"vllm_source: {archive.name} holds no folder {part}/")
        (folder / parent).mkdir()
        (root / part).rename(folder / parent / part)
    shutil.rmtree(folder / "all")
    return folder


def run(command: list[str], **environment: str) -> None:
    """Run quietly; where it fails, stop with the tail of what it said."""
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-LOG_TAIL_LINES:])
        raise SystemExit(f"vllm_source: this failed:\n$ {' '.join(command)}\n{tail}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: vllm_source.py VERSION")
    print(vllm_source(sys.argv[1]))

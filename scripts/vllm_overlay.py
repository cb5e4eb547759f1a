# SPDX-License-Identifier: Apache-2.0
"""Lay the Python of another vLLM release over the compiled parts of the installed one.

Releases without a build for this machine can be tested so: all that is Python is theirs, the
kernels are those of the installed build. Kept below the virtual environment this runs in, as
``vllm-overlay/<version>``, beside the sources that it is made of (see ``vllm_source.py``):

- ``vllm``: the package of that release, with the compiled parts of the installed one
- ``vllm-<version>+cpu.dist-info``: its metadata, with the requirements of the installed one

A process takes it by ``PYTHONPATH=<folder>``; the environment itself is not changed.

Usage: .venv/bin/python scripts/vllm_overlay.py VERSION     prints the folder as its last line
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from vllm_source import vllm_source

STAMP = "made-of"  # of an overlay: which release, over which compiled parts


def vllm_overlay(version: str) -> Path:
    """The folder with a release of vLLM that runs on this machine; made where it is not there, or
    where another vLLM has been installed since.

    Raises:
        SystemExit: the version is malformed, the package index has no sources of it, or no compiled
            vLLM is installed.
    """
    folder = Path(sys.prefix) / "vllm-overlay" / version
    site = Path(sysconfig.get_path("purelib"))
    return make_overlay(folder, version, site, lambda: vllm_source(version) / "sources" / "vllm")


def make_overlay(folder: Path, version: str, site: Path, fetch: Callable[[], Path]) -> Path:
    """Make `folder`, or leave it if it is up to date.

    Args:
        site: site-packages with a compiled vLLM.
        fetch: returns the Python package of the release; called only where it is needed.
    """
    compiled = sorted(path.relative_to(site) for path in (site / "vllm").rglob("*.so*"))
    if not compiled:
        raise SystemExit(
            f"vllm_overlay: {site} has no vLLM with compiled parts, which an overlay takes from "
            "it: run make setup"
        )
    [metadata] = site.glob("vllm-[0-9]*.dist-info")
    facts = (f"{part} {(site / part).stat().st_mtime_ns}" for part in compiled)
    stamp = "\n".join([f"{version} over {metadata.name}", *facts, ""])
    if folder.is_dir():
        if (folder / STAMP).read_text() == stamp:
            return folder
        print(f"vllm_overlay: another vLLM was installed since {folder} was made", flush=True)
    print(f"vllm_overlay: Python of vLLM {version} over the parts of {metadata.stem}", flush=True)
    started_s = time.monotonic()
    sources = fetch()
    folder.parent.mkdir(exist_ok=True)
    # beside it, so that it is moved in one piece or not at all
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{version}-") as work:
        overlay = Path(work) / "overlay"
        shutil.copytree(sources, overlay / "vllm")
        for part in compiled:
            link_or_copy(site / part, overlay / part)
        write_version(overlay / "vllm" / "_version.py", version)
        write_metadata(overlay / f"vllm-{version}+cpu.dist-info", version, metadata)
        (overlay / STAMP).write_text(stamp)
        if folder.exists():
            folder.replace(Path(work) / "outdated")
        overlay.replace(folder)
    print(f"vllm_overlay: done in {time.monotonic() - started_s:.0f} s", flush=True)
    return folder


def link_or_copy(source: Path, target: Path) -> None:
    """Compiled parts are hundreds of megabytes."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def write_version(target: Path, version: str) -> None:
    """What vLLM's build writes."""
    numbers = ", ".join(re.findall(r"\d+", version)[:3])
    target.write_text(
        f"__version__ = version = {version!r}\n"
        f"__version_tuple__ = version_tuple = ({numbers})\n"
        "__commit_id__ = commit_id = None\n"
    )


def write_metadata(target: Path, version: str, installed: Path) -> None:
    """That of the installed vLLM, with this version."""
    shutil.copytree(installed, target)
    text = (target / "METADATA").read_text()
    text = re.sub(r"(?m)^Version: .*$", f"Version: {version}+cpu", text, count=1)
    (target / "METADATA").write_text(text)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: vllm_overlay.py VERSION")
    print(vllm_overlay(sys.argv[1]))

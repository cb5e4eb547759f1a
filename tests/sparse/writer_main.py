# SPDX-License-Identifier: Apache-2.0
"""Writes versions of one file until it is killed: `writer_main.py PATH FIRST_VERSION`."""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path

import numpy as np

from vllm_relay.sparse.files.section_file import SectionWriter

NUM_ROWS = 40_000


def section_of(version: int, name: str) -> np.ndarray:
    seed = [version, *name.encode()]
    return np.random.default_rng(seed).integers(0, 2**32, (NUM_ROWS, 16), dtype=np.uint32)


def write(path: Path, version: int) -> None:
    with SectionWriter(path, {"version": version}) as writer:
        for name in ("keys", "values"):
            rows = section_of(version, name)
            with writer.section(name, rows.dtype, rows.shape) as section:
                for begin in range(0, NUM_ROWS, 999):
                    section.write(rows[begin : begin + 999])


if __name__ == "__main__":
    print("begins", flush=True)
    for version in count(int(sys.argv[2])):
        write(Path(sys.argv[1]), version)

# SPDX-License-Identifier: Apache-2.0
"""Builds contenders, or takes rivals that an earlier run has built from a folder."""

from __future__ import annotations

import json
import re
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.sparse.searches.contenders import Contender


@dataclass(frozen=True)
class Built:
    """A contender that is ready to search, and the CPU time its build took, of all threads."""

    contender: Contender
    build_cpu_s: float


def build(
    contender_class: type[Contender],
    keys: np.ndarray,
    train_queries: np.ndarray,
    cache: Path | None,
    set_name: str,
) -> Built:
    """Builds a contender, or loads it.

    Args:
        cache: the folder of built ones; None for none. An entry is trusted: it must come from the
            same version of its library.
        set_name: of the keys; entries carry it and a checksum of the keys.
    """
    contender = contender_class()
    if cache is None:
        return _timed_build(contender, keys, train_queries)
    cache.mkdir(parents=True, exist_ok=True)
    checksum = zlib.crc32(np.ascontiguousarray(keys))
    path = cache / re.sub(r"[^\w.-]+", "-", f"{set_name}-{checksum:08x}-{contender.name}")
    notes = path.with_name(path.name + ".json")
    if notes.exists() and contender.load(path):
        return Built(contender, json.loads(notes.read_text())["build_cpu_s"])
    built = _timed_build(contender, keys, train_queries)
    if contender.save(path):
        notes.write_text(json.dumps({"build_cpu_s": built.build_cpu_s}))
    return built


def _timed_build(contender: Contender, keys: np.ndarray, train_queries: np.ndarray) -> Built:
    began_s = time.process_time()
    contender.build(keys, train_queries)
    return Built(contender, time.process_time() - began_s)

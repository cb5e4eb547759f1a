# SPDX-License-Identifier: Apache-2.0
"""The kernels of the index that run here; the faces always ask for the fastest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from vllm_relay import _C

KERNELS = _C.index.kernels()
NAMED = (
    "encode", "nearest", "build_graph",
    "FlatSearcher", "BlockSearcher", "ListSearcher", "GraphSearcher",
)  # fmt: skip


@contextmanager
def kernel(name: str) -> Iterator[None]:
    """Indexes built and restored inside use this kernel."""

    def instead(original: Any) -> Any:
        def call(wanted: str, *arguments: Any) -> Any:
            assert wanted == "auto"
            return original(name, *arguments)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for function in NAMED:
            patch.setattr(_C.index, function, instead(getattr(_C.index, function)))
        yield

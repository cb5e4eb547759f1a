# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator

import pytest

from vllm_relay.sparse.index import compiled_index


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Indexes are so small that more threads would mostly wait for each other, several times as
    long where cores are busy. Tests of threads set a number of their own."""
    check_threads = compiled_index.check_threads
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            compiled_index, "check_threads", lambda n: 1 if n is None else check_threads(n)
        )
        yield

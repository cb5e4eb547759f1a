# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.waiting import WAIT_S
from vllm_relay.long_context.host import index_builders


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No index is built before it is set."""
    may_build, build_index = threading.Event(), index_builders.build_index

    def build_slowly(*args: Any) -> Any:
        assert may_build.wait(WAIT_S)
        return build_index(*args)

    monkeypatch.setattr(index_builders, "build_index", build_slowly)
    yield may_build
    may_build.set()

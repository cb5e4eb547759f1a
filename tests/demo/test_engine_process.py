# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from vllm_relay.demo.engine_process import in_turn, running_engines


def test_the_one_that_begins_changes_with_every_round() -> None:
    assert [in_turn("ab", number) for number in range(3)] == [["a", "b"], ["b", "a"], ["a", "b"]]


def test_an_engine_is_stopped_if_the_next_one_cannot_be_made() -> None:
    stopped: list[str] = []

    def engines() -> Iterator[Any]:
        first = ExitStack()
        first.callback(stopped.append, "first")
        yield first
        raise OSError("too many files")

    with pytest.raises(OSError, match="too many files"), running_engines(engines()):
        pass
    assert stopped == ["first"]

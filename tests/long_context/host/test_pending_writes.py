# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import functools

import pytest
import torch

from vllm_relay.long_context.host import device_copies
from vllm_relay.long_context.host.device_copies import PendingWrites


class Copy:
    """A copy of a number."""

    def __init__(self, number: float, waited: list[float]) -> None:
        self.number, self.waited = number, waited

    def wait(self) -> torch.Tensor:
        self.waited.append(self.number)
        return torch.tensor(self.number)


def add(writes: PendingWrites, layer: str, *numbers: float, num_bytes: int = 4) -> list[float]:
    """Returns what is written, as it is."""
    written: list[float] = []
    waited: list[float] = []

    def write(arrived: torch.Tensor) -> None:
        assert waited[-1] == arrived.item()
        written.append(arrived.item())

    for number in numbers:
        writes.add(layer, num_bytes, Copy(number, waited), functools.partial(write))
    return written


def test_writes_of_a_layer_are_finished_in_order_once() -> None:
    writes = PendingWrites()
    first, second = add(writes, "a", 1, 2), add(writes, "b", 3)
    again = add(writes, "a", 4)
    assert first == second == again == []
    writes.finish("a")
    assert (first, second, again) == ([1, 2], [], [4])
    writes.finish()
    writes.finish()
    assert (first, second, again) == ([1, 2], [3], [4])


def test_the_oldest_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_copies, "MAX_PENDING_BYTES", 100)
    writes = PendingWrites()
    written = add(writes, "a", 1, 2, num_bytes=50)
    assert written == []
    add(writes, "b", 3, num_bytes=40)
    assert written == [1]
    writes.finish("b")
    more = add(writes, "b", 4, num_bytes=50)
    assert written == [1] and more == []
    huge = add(writes, "b", 5, num_bytes=1000)
    assert written == [1, 2] and more == [4] and huge == []
    writes.finish()
    assert add(writes, "c", 6, 7, num_bytes=50) == [] and huge == [5]

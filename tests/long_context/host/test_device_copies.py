# SPDX-License-Identifier: Apache-2.0
"""What CudaCopies asks of CUDA, in which order; nothing here runs on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_relay.long_context.host.device_copies import CudaCopies

DEVICE = torch.device("cpu")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls of CUDA's functions, each with the stream it is asked of."""
    calls: list[str] = []
    current = ["compute"]

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.name = "side"

        def wait_stream(self, other: Any) -> None:
            calls.append(f"{self.name}: wait for {other.name}")

    class Event:
        def record(self) -> None:
            calls.append(f"{current[0]}: record")

        def synchronize(self) -> None:
            calls.append("host: wait for the record")

    @contextmanager
    def stream(entered: Stream) -> Iterator[None]:
        current.append(entered.name)
        current.reverse()
        yield
        current.reverse()
        current.pop()

    def copy(to: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False) -> None:
        calls.append(f"{current[0]}: copy, {non_blocking=}")
        to.data.fill_(3.0)

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        calls.append("host: pin a copy")
        return tensor.clone()

    empty = torch.empty

    def pinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        assert pin_memory
        return empty(*args, **kwargs)

    fakes = {
        "Stream": Stream,
        "Event": Event,
        "stream": stream,
        "current_stream": lambda device: SimpleNamespace(name=current[0]),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, by: calls.append(f"keep memory for {by.name}")
    )
    return calls


def test_a_copy_follows_what_computes_its_source_and_keeps_its_memory(log: list[str]) -> None:
    pending = CudaCopies(DEVICE).to_host(torch.ones(2, 3))
    assert log == [
        "side: wait for compute",
        "side: copy, non_blocking=True",
        "side: record",
        "keep memory for side",
    ]
    host = pending.wait()
    assert log[4:] == ["host: wait for the record"]
    assert host.tolist() == [[3.0] * 3] * 2


def test_only_whole_tensors_are_copied(log: list[str]) -> None:
    """Others would be gathered on the host."""
    with pytest.raises(AssertionError):
        CudaCopies(DEVICE).to_host(torch.ones(2, 3).T)


def test_the_host_may_go_on_writing_what_it_sends(log: list[str]) -> None:
    given = torch.ones(2)
    sent = CudaCopies(DEVICE).to_device(given)
    given.zero_()
    assert log == ["host: pin a copy"] and sent.tolist() == [1.0, 1.0]

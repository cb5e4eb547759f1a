# SPDX-License-Identifier: Apache-2.0
"""Tensors on their way between a GPU and pinned host memory, and what is written when they arrive.

PyTorch's allocator of pinned memory gives a buffer to nobody else before the copies that use it are
done, and keeps buffers for the next step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

MAX_PENDING_BYTES = 256 << 20
"""So much pinned memory, and as much on the device, may wait at most, but for one copy."""

Write = Callable[[torch.Tensor], None]


class Pending(Protocol):
    """A copy on its way to the host."""

    def wait(self) -> torch.Tensor:
        """The host's tensor, once it has arrived; may be called again."""
        ...


class DeviceCopies(Protocol):
    """Copies between one device and the host."""

    def to_host(self, tensor: torch.Tensor) -> Pending:
        """Begins to copy `tensor` as what the device was asked for so far leaves it.

        Args:
            tensor: contiguous, and made for this copy: nobody writes to its memory any more. The
                tensors that vLLM hands to a layer are not: a CUDA graph that is replayed next may
                use their memory, and KV blocks are given to other requests.
        """
        ...

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the device, in order with what it is asked for next; `tensor` may change."""
        ...


@dataclass
class _CudaPending:
    host: torch.Tensor
    done: torch.cuda.Event

    def wait(self) -> torch.Tensor:
        self.done.synchronize()
        return self.host


class CudaCopies:
    """Copies to the host run on a stream of their own, beside the computation."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def to_host(self, tensor: torch.Tensor) -> Pending:
        assert tensor.is_contiguous()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            host.copy_(tensor, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        tensor.record_stream(self.stream)  # its memory stays until then, whoever lets go of it
        return _CudaPending(host, done)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory().to(self.device, non_blocking=True)


@dataclass
class PendingWrites:
    """In the order in which they were begun. Whoever reads the host's copy of a layer finishes
    those of the layer first; all are finished before the next step begins."""

    _queue: deque[tuple[str, int, Pending, Write]] = field(default_factory=deque)
    _num_bytes: int = 0

    def add(self, layer_name: str, num_bytes: int, pending: Pending, write: Write) -> None:
        """`write` is called with what has arrived."""
        self._queue.append((layer_name, num_bytes, pending, write))
        self._num_bytes += num_bytes
        while self._num_bytes > MAX_PENDING_BYTES and len(self._queue) > 1:
            self._finish(self._queue.popleft())

    def finish(self, layer_name: str | None = None) -> None:
        """Waits for all copies, or for those of one layer, and writes them."""
        left: deque[tuple[str, int, Pending, Write]] = deque()
        while self._queue:
            each = self._queue.popleft()
            if layer_name in (None, each[0]):
                self._finish(each)
            else:
                left.append(each)
        self._queue = left

    @torch.inference_mode()  # as steps are computed in, which made the layers
    def _finish(self, each: tuple[str, int, Pending, Write]) -> None:
        _, num_bytes, pending, write = each
        self._num_bytes -= num_bytes
        write(pending.wait())

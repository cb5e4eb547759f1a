# SPDX-License-Identifier: Apache-2.0
"""Keys, values and queries that are on their way from a device to the host's copy."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from vllm_relay.long_context.host.device_copies import Pending

MAX_PENDING_BYTES = 256 << 20
"""So much pinned memory, and as much on the device, may wait at most, but for one copy."""

Write = Callable[[torch.Tensor], None]


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

# SPDX-License-Identifier: Apache-2.0
"""A branch of a CUDA graph: what may run beside something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")
U = TypeVar("U")


class Branch:
    """A second stream, which is taken while a CUDA graph is captured: once a graph has branches,
    they cost the host nothing. Eager steps would pay for each with the host's time.

    Attributes:
        stream: None where there is none to take.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.stream = torch.cuda.Stream(device) if torch.device(device).type == "cuda" else None

    def both(self, beside: Callable[[], T], here: Callable[[], U]) -> tuple[T, U]:
        """The results of two calls that do not need each other's; what follows waits for both.

        Args:
            beside: goes to the branch. What it allocates is reused by calls on the branch alone,
                and they wait for what has followed here.
            here: stays on the current stream.
        """
        if self.stream is None or not torch.cuda.is_current_stream_capturing():
            return beside(), here()
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            there = beside()
        result = here()
        current.wait_stream(self.stream)
        return there, result

# SPDX-License-Identifier: Apache-2.0
"""Copies of the host's arrays on the device, which the host does not wait for."""

from __future__ import annotations

import numpy as np
import torch


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A new tensor there; on a CPU it shares the array's memory."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device=device)
    return tensor.pin_memory().to(device, non_blocking=True)


def upload_into(target: torch.Tensor, array: np.ndarray) -> None:
    """To the beginning of a tensor; both have one dimension."""
    source = torch.from_numpy(array)
    if target.is_cuda:
        source = source.pin_memory()
    target[: len(array)].copy_(source, non_blocking=True)

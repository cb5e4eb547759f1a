# SPDX-License-Identifier: Apache-2.0
"""Copies of the host's arrays on the device, which the host does not wait for."""

from __future__ import annotations

import numpy as np
import torch


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A new tensor there; on a CPU it shares the array's memory."""
    return _pinned(array, device).to(device=device, non_blocking=True)


def upload_into(target: torch.Tensor, array: np.ndarray) -> None:
    """To the beginning of a tensor; both have one dimension."""
    target[: len(array)].copy_(_pinned(array, target.device), non_blocking=True)


def _pinned(array: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor

# SPDX-License-Identifier: Apache-2.0
"""Host memory of requests goes back to the system with them."""

from __future__ import annotations

import platform

import numpy as np
import psutil
import pytest
import torch

from vllm_relay.long_context.host.host_sequence import (
    HostLayer,
    SequencePlace,
    mapped_empty,
    return_free_memory,
)

MIB = 1 << 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 5), (1, 1000, 64), (2, 0, 8)], ids=str)
def test_a_tensor_like_any_other(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    made = mapped_empty(shape, dtype)
    assert made.shape == shape and made.dtype == dtype and made.is_contiguous()
    made.fill_(3)
    part = made[:1]
    del made
    assert bool((part == 3).all())


def taken_mib() -> float:
    return float(psutil.Process().memory_info().rss / MIB)


def filled(num_tokens: int) -> list[HostLayer]:
    """Layers that take 4 MiB each: less than what allocators give back at once."""
    place = SequencePlace(0, num_tokens, 0, 0, 0)
    layers = [HostLayer(place, 4, 64, torch.float32) for _ in range(16)]
    states = torch.ones(num_tokens, 4, 64)
    for layer in layers:
        layer.write(0, states, states)
    return layers


def test_what_requests_take_does_not_grow_with_their_number() -> None:
    """One begins before the other has ended, of other lengths, as they come."""
    earlier = filled(2048)
    before_mib = taken_mib()
    for number in range(12):
        later = filled(2048 - 100 * (number % 3))
        earlier = later
        del later
    assert taken_mib() - before_mib < 20
    del earlier
    assert taken_mib() - before_mib < -40


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="what glibc keeps")
def test_freed_memory_goes_back_to_the_system() -> None:
    """Also what lies below something that is still there."""
    return_free_memory()  # else parts may lie in what is free before
    before_mib = taken_mib()
    parts = [np.ones(64 << 10, np.uint8) for _ in range(1024)]
    assert taken_mib() - before_mib > 50
    last = parts.pop()
    parts.clear()
    return_free_memory()
    assert last[0] and taken_mib() - before_mib < 10

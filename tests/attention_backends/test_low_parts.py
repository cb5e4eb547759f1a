# SPDX-License-Identifier: Apache-2.0
"""Weights that are two bf16 numbers, and one where the lower one does not show."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention_backends import low_parts
from tests.support.depth import cases
from vllm_relay.attention_backends.cpu import kernels as cpu

KERNELS = [name for name in cpu.usable_kernels(torch.bfloat16) if name == "avx512_bf16"]
every_kernel = pytest.mark.parametrize("kernel", KERNELS)


@every_kernel
@settings(max_examples=cases(10))
@given(seed=st.integers(0, 2**32 - 1))
def test_rows_drop_theirs_whatever_is_beside_them(kernel: str, seed: int) -> None:
    low_parts.check_grouping(kernel, seed)


@every_kernel
@pytest.mark.parametrize("sinks", low_parts.SINKS)
@pytest.mark.parametrize("num_threads", [1, 64])
def test_those_that_do_not_show_are_dropped(
    kernel: str, sinks: tuple[int, int], num_threads: int
) -> None:
    low_parts.check_which_are_dropped(kernel, sinks, num_threads)

# SPDX-License-Identifier: Apache-2.0
"""How exact the functions of torch are on CPUs."""

from __future__ import annotations

import functools


@functools.cache
def choose_math_kernels() -> None:
    """Call each elementwise function of torch that goes to MKL once, with one element.

    Reason: MKL (2024.2, in torch 2.13) chooses a function's kernel in its first call. Where threads
    share that call, one of them may compute its part to 11 bits, and nobody hears of it: of 14,428
    processes on two busy cores 4 had wrong cosines. In vLLM these are the rotary embeddings, which
    a process computes once: its answers differ from those of all other replicas until it ends.
    Remove when: torch has MKL 2025 or later (https://github.com/pytorch/pytorch/issues/188792).
    """
    import torch

    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for name in _FUNCTIONS:
            getattr(torch, name)(one)


_FUNCTIONS = (
    *("abs", "acos", "asin", "atan", "ceil", "cos", "erf", "erfc", "erfinv", "exp", "expm1"),
    *("floor", "lgamma", "log", "log10", "log1p", "log2", "round", "sin", "sqrt", "tan", "tanh"),
    "trunc",
)

# SPDX-License-Identifier: Apache-2.0
"""What a worker process of `compilation.Compiler` does."""

import os
import time
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks.cuda.baselines import TritonUnified
from benchmarks.cuda.inputs import DeviceBatch, Inputs, Relay
from benchmarks.cuda.variants import Variant

_unified: TritonUnified | None = None


class StandInDriver:
    """Names the GPU that is compiled for."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


def start(capability: tuple[int, int], unified_attention: str | None) -> None:
    """Prepares this process: from here on kernels are compiled when called, and not launched."""
    global _unified
    torch.set_num_threads(1)
    os.nice(5)
    driver.set_active(StandInDriver(GPUTarget("cuda", capability[0] * 10 + capability[1], 32)))
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run = compile_only
    if unified_attention is not None:
        _unified = TritonUnified.find(unified_attention)


def compile_variant(variant: Variant) -> float:
    """Compiles all kernels of a variant; returns the seconds it took."""
    began_s = time.perf_counter()
    geometry, limits = variant.geometry, variant.limits
    relay = Relay("meta", geometry, variant.config, limits, num_sms=1)
    for max_query_len in variant.max_query_lens:
        batch = DeviceBatch.unfilled(limits, geometry.block_size, max_query_len)
        inputs = Inputs.unfilled(batch, geometry, variant.features, "meta")
        lse = relay.new_lse(inputs) if variant.has_lse else None
        relay.attend(inputs, torch.empty_like(inputs.query), lse)
        if variant.rivals and _unified is not None:
            for call in _unified.all_ways(inputs):
                call()
    return time.perf_counter() - began_s

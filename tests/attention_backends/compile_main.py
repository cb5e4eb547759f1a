# SPDX-License-Identifier: Apache-2.0
"""Compiles variants of the Triton kernels for one compute capability, in a process that has Triton
without its interpreter; prints a JSON object of what came out."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import triton
from triton.backends.nvidia.compiler import CUDABackend

from tests.attention_backends.kernel_variants import variants
from vllm_relay.attention_backends.cuda.config import shipped_for

EVERY_FEATURE = {"soft_cap": True, "alibi": True, "window": True, "sinks": True}
VARIANTS: dict[int, dict[str, dict[str, Any]]] = {
    90: {
        "bf16": {},
        "fp16, every feature": {"dtype": "fp16", **EVERY_FEATURE},
        "bf16, hidden tokens": {"hides": True},
        "fp8 cache, head size 80, hidden tokens": {
            "kv_dtype": "fp8e4nv",
            "head_size": 80,
            "hides": True,
        },
        "head size 256": {"head_size": 256},
    },
    80: {
        "bf16": {},
        "bf16, hidden tokens": {"hides": True},
        "fp16, every feature": {"dtype": "fp16", **EVERY_FEATURE},
        "head size 256": {"head_size": 256},
        "fp32": {"dtype": "fp32", "head_size": 64, "num_heads": 8},
    },
    89: {"head size 256": {"head_size": 256}},
    100: {"bf16": {}},
    120: {"fp8 cache": {"kv_dtype": "fp8e4nv"}},
}
ATTENTION_ONLY = (89, 100, 120)
"""The other kernels are the same there."""


def ptxas_works() -> bool:
    try:
        command = [triton.knobs.nvidia.ptxas.path, "--version"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except (AttributeError, OSError, RuntimeError):
        return False


def compile_variants(capability: int) -> dict[str, dict[str, dict[str, Any]]]:
    """{variant: {kernel: facts}}"""
    result: dict[str, dict[str, dict[str, Any]]] = {}
    for name, options in VARIANTS[capability].items():
        result[name] = {}
        config = shipped_for(divmod(capability, 10))
        for kernel, compile_for in variants(config, **options):
            if capability in ATTENTION_ONLY and kernel != "attention_kernel":
                continue
            compiled = compile_for(capability)
            result[name][kernel] = {
                "shared_bytes": compiled.metadata.shared,
                "wgmma": "wgmma.mma_async" in compiled.asm["ptx"],
                "mma.sync": "mma.sync" in compiled.asm["ptx"],
                "copies_in_flight": max(
                    map(int, re.findall(r"cp\.async\.wait_group\s+(\d+)", compiled.asm["ptx"])),
                    default=0,
                ),
                "own_barriers": compiled.asm["ptx"].count("bar.sync 0; mov"),
                "target": f".target sm_{capability}" in compiled.asm["ptx"],
            }
    return result


if __name__ == "__main__":
    if not ptxas_works():  # PTX is as far as it goes
        CUDABackend.make_cubin = lambda *arguments: b""
    print(json.dumps(compile_variants(int(sys.argv[1]))))

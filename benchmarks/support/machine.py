# SPDX-License-Identifier: Apache-2.0
"""The machine a result was measured on, and what it can do at best."""

import functools
import json
import os
import platform
import shlex
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path

PEAK_SOURCE = Path(__file__).with_name("peak.cpp")
RELEVANT_CPU_FLAGS = (
    "avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8",
    "asimd", "bf16", "hypervisor",
)  # fmt: skip


def describe() -> dict:
    """CPU, caches, memory and the versions of the software involved."""
    import torch

    from vllm_relay import _C

    lscpu = _lscpu()
    flags = set(lscpu.get("Flags", "").split())
    return {
        "cpu": lscpu.get("Model name", platform.processor() or platform.machine()),
        "cpu_family_model": f"{lscpu.get('CPU family', '?')} / {lscpu.get('Model', '?')}",
        "cpus": os.cpu_count(),
        "threads_per_core": lscpu.get("Thread(s) per core", "?"),
        "cpu_flags": [flag for flag in RELEVANT_CPU_FLAGS if flag in flags],
        "caches": {
            level: lscpu[f"{level} cache"]
            for level in ("L1d", "L2", "L3")
            if f"{level} cache" in lscpu
        },
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "vllm": _vllm_version(),
        "vllm_relay": version("vllm-relay"),
        "relay_kernels": _C.supported_kernels(),
    }


def available_cores() -> list[int]:
    """Cores this process was given, also when its main thread is bound to one of them."""
    if bound := os.environ.get("GOMP_CPU_AFFINITY"):
        return [int(core) for core in bound.split()]
    return sorted(os.sched_getaffinity(0))


def measure_peak(threads: int = 1) -> dict:
    """Multiplication and memory read rates of `threads` cores at once; empty without a compiler."""
    program = _compile_peak()
    if program is None:
        return {}
    cores, environment = available_cores(), dict(os.environ)
    for name in ("LD_PRELOAD", "GOMP_CPU_AFFINITY"):
        environment.pop(name, None)
    output = subprocess.run(
        [program, str(threads)],
        capture_output=True,
        check=True,
        env=environment,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    ).stdout
    return json.loads(output)


def bf16_peak_gflops(peak: dict) -> float | None:
    """The fastest way this CPU multiplies bf16 numbers, be it as fp32."""
    rates = [rate for name, rate in peak.items() if name.endswith("gflops")]
    return max(rates, default=None)


def attention_ceiling_gflops(peak: dict, kernel: str) -> float | None:
    """What is left of the peak for the multiplications attention needs: `avx512_bf16` keeps weights
    as two bfloat16 numbers each, so that of three multiplications two count."""
    best = bf16_peak_gflops(peak)
    return best and best * (2 / 3 if kernel == "avx512_bf16" else 1.0)


@functools.cache
def _compile_peak() -> str | None:
    folder = tempfile.TemporaryDirectory(prefix="relay-peak-")
    _compile_peak.folder = folder  # lives as long as the process
    program = str(Path(folder.name) / "peak")
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    flags = ["-O3", "-march=native", "-ffp-contract=fast", "-Wno-psabi", "-pthread"]
    try:
        subprocess.run(
            [*compiler, *flags, str(PEAK_SOURCE), "-o", program], check=True, capture_output=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"no fractions of the peak: {PEAK_SOURCE.name} cannot be compiled: {error}")
        return None
    return program


def _lscpu() -> dict[str, str]:
    try:
        text = subprocess.run(
            ["lscpu"], capture_output=True, text=True, check=True, env={**os.environ, "LC_ALL": "C"}
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return {}
    lines = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, value in lines}


def _vllm_version() -> str:
    import vllm

    return vllm.__version__

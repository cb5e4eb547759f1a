# SPDX-License-Identifier: Apache-2.0
"""The attention kernels of aarch64, cross-compiled and run by qemu: `relay_attention` as
`vllm_relay.attention_backends.cpu.kernels` has it."""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_relay.attention_backends.cpu.kernels import DTYPE_CODES, FP8
from vllm_relay.attention_backends.plan import StepPlan

ROOT = Path(__file__).resolve().parents[3]
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
PACKAGES = "g++-aarch64-linux-gnu qemu-user-static"
NEON_BF16 = ["-march=armv8.2-a+bf16"]
SOURCES: dict[str, list[str]] = {
    "csrc/attention/attention_portable.cpp": [],
    "csrc/attention/attention_neon.cpp": [],
    "csrc/attention/attention_neon_bf16.cpp": NEON_BF16,
    "csrc/attention/kernels.cpp": [],
    "csrc/common/aligned_buffer.cpp": [],
    "csrc/common/cpu_features.cpp": [],
    "tests/native/attention_server.cpp": [],
}
"""And what their instructions need beyond those of every aarch64 CPU."""
FLAGS = [
    "-std=c++20", "-O3", "-DNDEBUG", "-ffp-contract=off", "-fno-math-errno", "-fopenmp", "-Icsrc",
    "-Wall", "-Wextra", "-Wno-psabi", "-Werror", "-DRELAY_HAVE_NEON=1", "-DRELAY_HAVE_NEON_BF16=1",
    "-ftrivial-auto-var-init=pattern",
]  # fmt: skip
"""With the last one, what nobody wrote to is -1.7e38: reading it shows."""


def build(folder: Path) -> Path:
    """The kernels' server."""
    missing = [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]
    assert not missing, f"{missing} are missing. Debian, Ubuntu: apt install {PACKAGES}"
    objects = []
    for source, flags in SOURCES.items():
        target = folder / f"{Path(source).stem}.o"
        _compile([*FLAGS, *flags, "-c", source, "-o", str(target)])
        objects.append(str(target))
    server = folder / "attention_server"
    _compile([*objects, "-static", "-fopenmp", "-o", str(server)])
    return server


def _compile(arguments: list[str]) -> None:
    done = subprocess.run([COMPILER, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@contextmanager
def emulated_machine(server: Path) -> Iterator[EmulatedMachine]:
    """A process of the server."""
    with subprocess.Popen(
        [EMULATOR, "-cpu", "max", str(server)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        yield EmulatedMachine(process)


class EmulatedMachine:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process, self._to, self._from = process, process.stdin, process.stdout

    def relay_attention(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        plan: StepPlan,
        out: torch.Tensor,
        *,
        lse: torch.Tensor | None = None,
        scale: float,
        num_kv_heads: int,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        **features: Any,
    ) -> None:
        """As `cpu.kernels.relay_attention`, by `plan.kernel` of the other machine."""
        tokens, num_heads, head_size = query.shape
        self._send(plan.kernel.encode())
        self._to.write(
            struct.pack(
                "<9i3f6i",
                DTYPE_CODES[query.dtype], num_heads, num_kv_heads, head_size, kv_cache.shape[2],
                features.get("sliding_window") or 0, tokens, block_table.shape[1],
                kv_cache.dtype == FP8,
                scale * k_scale, features.get("logits_soft_cap") or 0.0, v_scale,
                plan.max_block_entries, plan.work.num_partial_entries, plan.work.num_scores,
                plan.num_threads, plan.heads_first, plan.hides_tokens,
            )
        )  # fmt: skip
        of_heads = features.get("alibi_slopes"), features.get("sinks")
        for tensor in (query, kv_cache, block_table, *of_heads):
            self._send(b"" if tensor is None else _bytes(tensor))
        work = plan.work
        for table in (
            plan.entries, work.spans, work.row_blocks, work.items, work.divisions,
            work.score_items, work.weight_items, work.value_items, work.merges,
        ):  # fmt: skip
            self._send(np.ascontiguousarray(table, np.int32).tobytes())
        self._to.flush()
        self._receive(out)
        self._receive(torch.empty(tokens, num_heads) if lse is None else lse)

    def _send(self, array: bytes) -> None:
        self._to.write(struct.pack("<q", len(array)))
        self._to.write(array)

    def _receive(self, into: torch.Tensor) -> None:
        wanted = into.numel() * into.element_size()
        received = self._from.read(wanted)
        assert len(received) == wanted, f"the kernels ended with {self._process.poll()}"
        if wanted:
            flat = torch.frombuffer(bytearray(received), dtype=into.dtype)
            into.copy_(flat.view(into.shape))


def _bytes(tensor: torch.Tensor) -> bytes:
    contiguous: Any = tensor.contiguous().flatten().view(torch.uint8)
    return contiguous.numpy().tobytes()

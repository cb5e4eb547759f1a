# SPDX-License-Identifier: Apache-2.0
"""The rivals that were found, and the best of them on given inputs."""

from typing import Any

import torch

from benchmarks.cuda.baselines import (
    Call,
    FlashAttention3,
    Sdpa,
    TritonUnified,
    Unsupported,
    UpstreamFlashAttention3,
)
from benchmarks.cuda.device import Device
from benchmarks.cuda.inputs import Inputs
from benchmarks.cuda.result import without_folders

CLOSE = 0.02
"""Largest difference of a rival's output from relay's, of the largest output: rivals that compute
something else are not timed."""


class Rivals:
    """Looks for all rivals; what is missing, fails or is wrong is left out, with the reason.

    Args:
        unified_attention: path of vLLM's `triton_unified_attention.py`, or None to look for it.
        fa3: path of vLLM's `_vllm_fa3_C.abi3.so`, or None to look for it.
        installed: whether to look for installed packages too.
    """

    def __init__(
        self, device: Device, *, unified_attention: str | None, fa3: str | None, installed: bool
    ) -> None:
        self.device = device
        self.states: dict[str, str] = {}
        self.found: dict[str, Any] = {}
        self.unified_path: str | None = None
        searches: list[tuple[Any, str | None]] = [
            (FlashAttention3, fa3), (UpstreamFlashAttention3, None),
            (TritonUnified, unified_attention),
        ]  # fmt: skip
        for rival, path in searches:
            if path is None and not installed:
                self.states[rival.name] = "not looked for"
                continue
            try:
                self.found[rival.name] = rival.find(path)
                self.states[rival.name] = "found"
            except Exception as error:
                self.states[rival.name] = f"missing: {_short(error)}"
        if TritonUnified.name in self.found:
            self.unified_path = unified_attention or TritonUnified.installed_path()
        self.found[Sdpa.name] = Sdpa()
        self.states[Sdpa.name] = "found"

    @property
    def only_sdpa(self) -> bool:
        return list(self.found) == [Sdpa.name]

    def prepare(
        self, inputs: Inputs, reasons: dict[str, str] | None = None, *, sdpa: bool = True
    ) -> dict[str, Call]:
        """Those that can compute these inputs, FlashAttention 3 first.

        Args:
            reasons: takes why others cannot.
            sdpa: without it, SDPA takes part only where it is the only rival.
        """
        calls: dict[str, Call] = {}
        for name, rival in self.found.items():
            if name == Sdpa.name and not sdpa and not self.only_sdpa:
                continue
            try:
                call = rival.prepare(inputs, self.device.free_bytes())
                call()
                self.device.synchronize()
                calls[name] = call
            except Unsupported as reason:
                if reasons is not None:
                    reasons[name] = str(reason)
            except Exception as error:
                if not self.device.is_alive():
                    raise
                self.states[name] = f"found, but failed at {inputs.geometry}: {_short(error)}"
                if reasons is not None:
                    reasons[name] = _short(error)
        return calls

    def agreeing(self, inputs: Inputs, expected: torch.Tensor, **options: Any) -> dict[str, Call]:
        """Those whose output is that of relay's call."""
        calls = self.prepare(inputs, **options)
        largest = float(expected.float().abs().max())
        for name in list(calls):
            error = float((calls[name]().float() - expected.float()).abs().max())
            if not error <= CLOSE * largest:
                del calls[name]
                self.states[name] = (
                    f"found, but differs from relay by {error / largest:.2g} of the largest output "
                    f"at {inputs.geometry}"
                )
        return calls


def _short(error: BaseException) -> str:
    return without_folders(f"{type(error).__name__}: {error}".splitlines()[0][:200])

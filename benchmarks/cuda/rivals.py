# SPDX-License-Identifier: Apache-2.0
"""The rivals that were found, and the best of them on given inputs."""

from collections.abc import Callable
from functools import partial
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
from benchmarks.cuda.cascades import FlashAttention3Cascade, FlashInferCascade
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
        self.cascades: dict[str, Any] = {}
        """Those that read one shared prefix once."""
        self.unified_path: str | None = None

        def look_for(
            found: dict[str, Any], name: str, find: Callable[..., Any], *paths: str | None
        ) -> None:
            if not installed and not all(paths or (None,)):
                self.states[name] = "not looked for"
                return
            try:
                found[name] = find(*paths)
                self.states[name] = "found"
            except Exception as error:
                self.states[name] = f"missing: {_short(error)}"

        for rival, path in (
            (FlashAttention3, fa3), (UpstreamFlashAttention3, None),
            (TritonUnified, unified_attention),
        ):  # fmt: skip
            look_for(self.found, rival.name, rival.find, path)
        fa3_cascade = FlashAttention3Cascade
        look_for(self.cascades, fa3_cascade.name, fa3_cascade.find, fa3, unified_attention)
        for backends in FlashInferCascade.BACKENDS:
            name = FlashInferCascade.name(backends)
            look_for(self.cascades, name, partial(FlashInferCascade.find, backends))
        if TritonUnified.name in self.found:
            self.unified_path = unified_attention or TritonUnified.installed_path()
        self.found[Sdpa.name] = Sdpa()
        self.states[Sdpa.name] = "found"

    @property
    def only_sdpa(self) -> bool:
        return list(self.found) == [Sdpa.name]

    def prepare(
        self,
        inputs: Inputs,
        reasons: dict[str, str] | None = None,
        *,
        sdpa: bool = True,
        cascades: bool = False,
    ) -> dict[str, Call]:
        """Those that can compute these inputs, FlashAttention 3 first.

        Args:
            reasons: takes why others cannot.
            sdpa: without it, SDPA takes part only where it is the only rival.
            cascades: those that read one shared prefix once, instead of those that share nothing.
        """
        calls: dict[str, Call] = {}
        for name, rival in (self.cascades if cascades else self.found).items():
            if name == Sdpa.name and not sdpa and not self.only_sdpa:
                continue
            try:
                call = rival.prepare(inputs, self.device.free_bytes())
                call()
                self.device.synchronize()
                if cascades:
                    self.device.capture(call)  # what allocates or waits cannot be captured
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

# SPDX-License-Identifier: Apache-2.0
"""What all parts of a run share."""

import importlib.util
import math
import statistics
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from benchmarks.cuda.baselines import Call
from benchmarks.cuda.clock import Clock
from benchmarks.cuda.compilation import Compiler
from benchmarks.cuda.device import Device
from benchmarks.cuda.geometry import Ceilings, Geometry
from benchmarks.cuda.inputs import KvPool, Relay
from benchmarks.cuda.limits import planner_limits, standard_limits
from benchmarks.cuda.result import CudaResult, without_folders
from benchmarks.cuda.rivals import Rivals
from benchmarks.cuda.variants import Variant
from benchmarks.support.timing import Timing, ratio
from vllm_relay.attention_backends.cuda.config import KernelConfig, config_for
from vllm_relay.attention_backends.cuda.plans.planner import PlannerLimits

T = TypeVar("T")

POOL_BYTES = 5 << 30
"""Holds the largest batch that is timed; less where the GPU has less memory."""
TINY_CONFIG = KernelConfig(
    tile_tokens=16, segment_tokens=32, section_tokens=64, small_rows=16, large_rows=32
)
RELAY = "relay"
MAX_FAILURES = 20
"""Cases that may fail before a part is given up."""


@dataclass
class Run:
    """Device, rivals, clock and result of a run."""

    device: Device
    clock: Clock
    result: CudaResult
    compiler: Compiler
    rivals: Rivals
    size: str
    """ "full", "quick" or "tiny", the last one for the interpreter."""
    _ceilings: Ceilings | None = None
    _pool: KvPool | None = None
    failures: int = 0

    def choose(self, full: T, quick: T, tiny: T) -> T:
        return {"full": full, "quick": quick, "tiny": tiny}[self.size]

    def config(self, geometry: Geometry) -> KernelConfig:
        """What relay takes on this GPU."""
        if self.size == "tiny":
            return TINY_CONFIG
        config = config_for(
            self.device.name,
            self.device.capability,
            head_size=geometry.head_size,
            kv_bytes=geometry.kv_dtype.itemsize,
        )
        return config.for_head_size(geometry.head_size, geometry.dtype.itemsize)

    @property
    def limits(self) -> PlannerLimits:
        """For what is timed."""
        if self.size == "tiny":
            return planner_limits(requests=16, tokens=32, seq_len=2048)
        return standard_limits()

    def relay(self, geometry: Geometry, config: KernelConfig | None = None) -> Relay:
        config = config or self.config(geometry)
        device = self.device
        return Relay(device.device, geometry, config, self.limits, num_sms=device.num_sms)

    def variant(
        self, geometry: Geometry, config: KernelConfig | None = None, **options: Any
    ) -> Variant:
        """What `relay` calls on this geometry."""
        return Variant(geometry, config or self.config(geometry), self.limits, **options)

    @property
    def pool(self) -> KvPool:
        if self._pool is None:
            num_bytes = min(POOL_BYTES, self.device.memory_bytes // 5)
            if self.size == "tiny":
                num_bytes = 1 << 22
            self._pool = KvPool(num_bytes, self.device.device)
        return self._pool

    def drop_pool(self) -> None:
        """Gives its memory back; it is made anew when next needed."""
        self._pool = None
        self.device.release()

    @property
    def ceilings(self) -> Ceilings:
        """Measured when first asked for."""
        if self._ceilings is None:
            self._ceilings = measure_ceilings(self)
            self.result.describe(
                ceilings={
                    "copy TB/s, reads and writes": self._ceilings.bytes_per_s / 1e12,
                    "bf16 matrix TFLOP/s": self._ceilings.flops_per_s / 1e12,
                }
                if self.device.measured
                else {}
            )
        return self._ceilings

    @contextmanager
    def tolerating(self, what: str) -> Iterator[None]:
        """Reports a case that fails and lets the others go on, as long as the GPU does."""
        try:
            yield
        except Exception as error:
            self.failures += 1
            if self.failures > MAX_FAILURES or not self.device.is_alive():
                raise
            traceback.print_exc()
            reason = without_folders(f"{type(error).__name__}: {error}"[:400])
            self.result.add_finding(f"WRONG: {what} failed: {reason}")

    def starts_engines(self, part: str, needed_s: float) -> bool:
        """Whether vLLM is here and so much time left; frees the pool's memory, or says why not."""
        left_s, is_found = self.clock.total_left_s, importlib.util.find_spec("vllm") is not None
        if self.size == "tiny" or not is_found:
            self.result.leave_out("vLLM not found" if not is_found else "no GPU to start vLLM on")
        elif left_s < needed_s:
            self.result.leave_out(
                f"{left_s:.0f} s are left, {needed_s:.0f} s are needed: run --only {part} "
                f"--total-s {3 * needed_s:.0f}"
            )
        else:
            self.drop_pool()
            return True
        return False

    def in_time(self, cases: Iterable[T], what: str, expected_s: float = 0.5) -> Iterator[T]:
        """Cases as long as the part has time; says how many it had not."""
        cases = list(cases)
        for index, case in enumerate(cases):
            if not self.clock.has(expected_s):
                self.result.leave_out(f"{len(cases) - index} of {len(cases)} {what}: out of time")
                return
            yield case


def measure_ceilings(run: Run) -> Ceilings:
    device, size = run.device, run.choose(8192, 8192, 64)
    numbers = run.choose(1 << 29, 1 << 29, 1 << 10)
    source = torch.empty(numbers, dtype=torch.bfloat16, device=device.device).normal_()
    target = torch.empty_like(source)
    copying = partial(target.copy_, source)
    copy = device.compare({"copy": copying}, flushed=False, rounds=9)["copy"]
    shape = (size, size)
    left, right = (
        torch.empty(shape, dtype=torch.bfloat16, device=device.device).normal_() for _ in range(2)
    )
    product = torch.empty_like(left)
    multiplying = partial(torch.mm, left, right, out=product)
    matmul = device.compare({"matmul": multiplying}, flushed=False, rounds=15)["matmul"]
    return Ceilings(2 * 2 * numbers / copy.median_s, 2.0 * size**3 / matmul.median_s)


@dataclass(frozen=True)
class Comparison:
    """relay against its rivals on one batch."""

    times: dict[str, Timing]

    @classmethod
    def measure(
        cls, device: Device, relay: Call, rivals: dict[str, Call], *, flushed: bool, rounds: int
    ) -> "Comparison":
        return cls(device.compare({RELAY: relay, **rivals}, flushed=flushed, rounds=rounds))

    @property
    def us(self) -> float:
        return self.times[RELAY].median_s * 1e6

    @property
    def best(self) -> str | None:
        """The fastest rival."""
        rivals = [name for name in self.times if name != RELAY]
        return min(rivals, key=lambda name: self.times[name].median_s, default=None)

    @property
    def best_us(self) -> float:
        return math.nan if self.best is None else self.times[self.best].median_s * 1e6

    @property
    def speedup(self) -> float:
        """Over the fastest rival; NaN without one."""
        return math.nan if self.best is None else ratio(self.times[self.best], self.times[RELAY])


def geometric_mean(values: Iterable[float]) -> float:
    """NaN for no values; what is NaN does not count."""
    known = [value for value in values if not math.isnan(value)]
    return statistics.geometric_mean(known) if known else math.nan


def least(values: Iterable[float]) -> float:
    """NaN for no values; what is NaN does not count."""
    return min((value for value in values if not math.isnan(value)), default=math.nan)


def percentile(values: Iterable[float], percent: float) -> float:
    """NaN for no values; what is NaN does not count."""
    known = sorted(value for value in values if not math.isnan(value))
    return known[min(len(known) - 1, int(percent / 100 * len(known)))] if known else math.nan

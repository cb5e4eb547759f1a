# SPDX-License-Identifier: Apache-2.0
"""What runs the kernels: a GPU with its stopwatch, or Triton's interpreter, which only runs them.

A time is the difference of two CUDA graphs that are replayed in turn, so that neither launching a
graph nor what stands around the call counts. *Flushed*: a graph that flushes the L2 cache before
each of several calls, against one that only flushes it. *Warm*: a graph of several calls, against a
graph of one. Contenders are measured in turn, round after round.
"""

import contextlib
import importlib.util
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.cuda import ROOT
from benchmarks.support.timing import Timing

Call = Callable[[], Any]

SHORT_CALLS = 4
"""Calls per graph, of calls that take less than LONG_S."""
LONG_S = 1e-3
VERY_LONG_S = 5e-3
FEW_ROUNDS = 3
"""At most, where a call takes longer than VERY_LONG_S."""
SLEEP_CYCLES = 100_000
"""Keeps the GPU busy until what is to be timed has been queued."""
SHORTEST_S = 1e-7
"""A difference of two measurements may come out negative."""


class Gpu:
    """The first CUDA device."""

    measured = True
    device = "cuda"

    def __init__(self) -> None:
        torch.cuda.init()
        properties = torch.cuda.get_device_properties(0)
        self.name: str = properties.name
        self.capability: tuple[int, int] = (properties.major, properties.minor)
        self.num_sms: int = properties.multi_processor_count
        self.l2_bytes: int = properties.L2_cache_size
        self.memory_bytes: int = properties.total_memory
        self._stream = torch.cuda.Stream()
        # written lines would be written back while the timed call runs: reading evicts them first
        self._written = torch.empty(2 * self.l2_bytes, dtype=torch.uint8, device=self.device)
        self._read = torch.zeros(self.l2_bytes // 2, dtype=torch.float32, device=self.device)
        self._sum = torch.zeros((), dtype=torch.float32, device=self.device)
        self._pool = torch.cuda.graph_pool_handle()
        self.flush()
        # a pool lives as long as a graph that uses it
        self._pool_keeper = self._capture(self.flush)
        self._flush_graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def describe(self) -> dict[str, Any]:
        return {
            "GPU": self.name,
            "compute capability": f"{self.capability[0]}.{self.capability[1]}",
            "multiprocessors": self.num_sms,
            "L2 MiB": round(self.l2_bytes / 2**20),
            "memory GiB": round(self.memory_bytes / 2**30, 1),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "CUDA": torch.version.cuda,
            "Python": sys.version.split()[0],
        }

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def is_alive(self) -> bool:
        """Whether the context survived: after an illegal access nothing runs any more."""
        try:
            torch.cuda.synchronize()
            return bool(torch.ones(1, device=self.device).item() == 1)
        except RuntimeError:
            return False

    def free_bytes(self) -> int:
        """Of device memory, cached blocks of the allocator included."""
        free, _ = torch.cuda.mem_get_info()
        return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()

    def release(self) -> None:
        """Gives cached memory back, before something large is allocated."""
        torch.cuda.empty_cache()

    def flush(self) -> None:
        self._written.zero_()
        torch.sum(self._read, 0, out=self._sum)

    def capture(self, call: Call) -> Call:
        """A CUDA graph of a call that has run before; returns its replay."""
        return self._capture(call).replay

    def compare(
        self, contenders: dict[str, Call], *, flushed: bool, rounds: int = 7, calls: int = 0
    ) -> dict[str, Timing]:
        """Seconds per call of each contender in every round.

        Args:
            calls: per graph; by their durations unless given.
        """
        pairs, longest_s = {}, 0.0
        for name, call in contenders.items():
            call()
            once_s = self._once_s(call)
            longest_s = max(longest_s, once_s)
            repeats = calls or (SHORT_CALLS if once_s < LONG_S else 1)
            if flushed:
                base = self._flush_graph(repeats)
                full = self._capture(_repeated(repeats, self.flush, call))
            else:
                base = self._capture(call)
                full = self._capture(_repeated(repeats + 1, call))
            pairs[name] = (base, full, repeats)
        for base, full, _ in pairs.values():
            base.replay()
            full.replay()
        if longest_s > VERY_LONG_S:
            rounds = min(rounds, FEW_ROUNDS)
        samples: dict[str, list[float]] = {name: [] for name in pairs}
        order = list(pairs)
        for index in range(rounds):
            turn = index % len(order)
            events = {
                name: [self._timed(graph.replay) for graph in pairs[name][:2]]
                for name in order[turn:] + order[:turn]
            }
            torch.cuda.synchronize()
            for name, times in events.items():
                base_ms, full_ms = (began.elapsed_time(ended) for began, ended in times)
                seconds = (full_ms - base_ms) * 1e-3 / pairs[name][2]
                samples[name].append(max(seconds, SHORTEST_S))
        return {name: Timing(values) for name, values in samples.items()}

    def _flush_graph(self, repeats: int) -> torch.cuda.CUDAGraph:
        if repeats not in self._flush_graphs:
            self._flush_graphs[repeats] = self._capture(_repeated(repeats, self.flush))
        return self._flush_graphs[repeats]

    def _once_s(self, call: Call) -> float:
        began, ended = self._timed(call)
        torch.cuda.synchronize()
        return began.elapsed_time(ended) * 1e-3

    def _timed(self, call: Call) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SLEEP_CYCLES)
        began.record()
        call()
        ended.record()
        return began, ended

    def _capture(self, call: Call) -> torch.cuda.CUDAGraph:
        # torch.cuda.graph would collect garbage and empty the allocator's cache each time
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                call()
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.synchronize()
        return graph


class Interpreter:
    """Triton's interpreter on CPU tensors: everything runs once and every time is NaN."""

    measured = False
    device = "cpu"
    name = "Triton's interpreter"
    capability = (9, 0)
    num_sms = 3
    l2_bytes = 1 << 20
    memory_bytes = 1 << 31

    def __init__(self) -> None:
        mend_interpreter()
        torch.set_num_threads(1)

    def describe(self) -> dict[str, Any]:
        return {
            "GPU": f"none: {self.name}", "torch": torch.__version__, "triton": triton.__version__
        }  # fmt: skip

    def synchronize(self) -> None:
        pass

    def is_alive(self) -> bool:
        return True

    def free_bytes(self) -> int:
        return self.memory_bytes

    def release(self) -> None:
        pass

    def flush(self) -> None:
        pass

    def capture(self, call: Call) -> Call:
        return call

    def compare(
        self, contenders: dict[str, Call], *, flushed: bool, rounds: int = 1, calls: int = 1
    ) -> dict[str, Timing]:
        for call in contenders.values():
            call()
        return {name: Timing([math.nan]) for name in contenders}


Device = Gpu | Interpreter


def mend_interpreter() -> None:
    """Loads the mends of the interpreter that the tests use; triton must have been imported with
    TRITON_INTERPRET=1."""
    path = Path(ROOT, "tests", "attention_backends", "triton_interpreter.py")
    spec = importlib.util.spec_from_file_location("relay_triton_interpreter", path)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def host_us(call: Call, device: Device, calls: int = 50) -> float:
    """Median time that the host spends in a call, in microseconds; NaN without a GPU."""
    if not device.measured:
        call()
        return math.nan
    samples = []
    for _ in range(calls):
        device.synchronize()
        began_s = time.perf_counter()
        call()
        samples.append(time.perf_counter() - began_s)
    device.synchronize()
    return sorted(samples)[calls // 2] * 1e6


def _repeated(times: int, *calls: Call) -> Call:
    def run() -> None:
        for _ in range(times):
            for call in calls:
                call()

    return run

# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels of a run ahead, in processes that touch no GPU.

Triton keeps what it has compiled on disk, under a key of the source and of how a kernel is called.
A worker stands in for the GPU's driver, calls what the run will call with tensors that have no
memory, and launches nothing; the run then finds every kernel compiled.
"""

import contextlib
import multiprocessing
import os
import time
from collections.abc import Iterable
from multiprocessing.pool import AsyncResult
from typing import Any

from benchmarks.cuda.result import without_folders
from benchmarks.cuda.variants import Variant

SPARE_CORES, MAX_WORKERS = 2, 16


class Compiler:
    """A pool of worker processes; without any, kernels are compiled where they are called.

    Args:
        capability: of the GPU, (9, 0) for sm_90.
        unified_attention: path of the rival that is written in Triton.
    """

    def __init__(
        self, capability: tuple[int, int], unified_attention: str | None, workers: int | None = None
    ) -> None:
        if workers is None:
            workers = min(max(1, len(os.sched_getaffinity(0)) - SPARE_CORES), MAX_WORKERS)
        self.num_workers = workers
        self.errors: dict[str, str] = {}
        self._results: dict[Variant, AsyncResult[float]] = {}
        self._waited_s = 0.0
        self._compiled_s: list[float] = []
        self.here: list[float] = []
        """Seconds of kernels that were compiled in this process all the same."""
        self.pool: Any = None
        if self.num_workers:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["benchmarks.cuda.compile_worker"])
            from benchmarks.cuda import compile_worker

            self.pool = context.Pool(
                self.num_workers,
                initializer=compile_worker.start,
                initargs=(capability, unified_attention),
            )
            self._listen()

    def submit(self, variants: Iterable[Variant]) -> None:
        """Orders compilations; those ordered first are done first."""
        if self.pool is None:
            return
        from benchmarks.cuda import compile_worker

        for variant in variants:
            if variant not in self._results:
                self._results[variant] = self.pool.apply_async(
                    compile_worker.compile_variant, (variant,)
                )

    def wait(self, variants: Iterable[Variant], timeout_s: float) -> None:
        """Waits for what was ordered. What fails or is late is tried again where it is called."""
        began_s = time.perf_counter()
        for variant in variants:
            if (result := self._results.get(variant)) is None:
                continue
            left_s = timeout_s - (time.perf_counter() - began_s)
            try:
                self._compiled_s.append(result.get(max(left_s, 0.0)))
                del self._results[variant]
            except multiprocessing.TimeoutError:
                break
            except Exception as error:
                self.errors[f"{variant.geometry}, {variant.config}"] = without_folders(
                    repr(error)[:500]
                )
                del self._results[variant]
        self._waited_s += time.perf_counter() - began_s

    def describe(self) -> dict[str, Any]:
        return {
            "worker processes": self.num_workers if self.pool is not None else 0,
            "variants": len(self._compiled_s),
            "their CPU s": round(sum(self._compiled_s), 1),
            "s waited for them": round(self._waited_s, 1),
            "kernels in this process": len(self.here),
            "their s": round(sum(self.here), 1),
            "failed": len(self.errors),
        }

    def close(self) -> None:
        """Ends the workers, whatever they do."""
        if self.pool is not None:
            self.pool.terminate()
            self.pool = None

    def _listen(self) -> None:
        import triton

        def note(*, times: Any, cache_hit: bool, **_: Any) -> None:
            if not cache_hit:
                self.here.append(times.total * 1e-6)

        with contextlib.suppress(AttributeError):
            triton.knobs.compilation.listener = note

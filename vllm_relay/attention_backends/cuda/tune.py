# SPDX-License-Identifier: Apache-2.0
"""Measures which kernel configuration is fastest on this GPU, and what states cost on it."""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from vllm_relay.attention_backends.cuda.config import KernelConfig, LayerShape, shipped_for
from vllm_relay.attention_backends.cuda.copies import upload
from vllm_relay.attention_backends.cuda.launch import relay_attention, setup_for
from vllm_relay.attention_backends.cuda.plans.planner import PlannerLimits, StepPlanner
from vllm_relay.attention_backends.forest import build_forest
from vllm_relay.attention_backends.groups import forest_for

MIN_STATE_COST, MAX_STATE_COST = 0.25, 8.0
MAX_START_TOKENS = 512.0
L2_FLUSH_BYTES = 256 << 20
REPEATS = 15


@dataclass(frozen=True)
class Shape:
    """What a model's attention layer looks like to the kernels."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    block_size: int = 16


@dataclass(frozen=True)
class Load:
    """A batch of decodes: groups of equal size, each with a prefix of its own."""

    requests: int
    groups: int
    prefix_tokens: int
    context_tokens: int


LOADS = (
    Load(8, 1, 4000, 128),
    Load(32, 1, 8192, 256),
    Load(64, 8, 2048, 512),
    Load(128, 1, 8192, 256),
    Load(256, 16, 1024, 384),
    Load(64, 64, 2048, 64),
)
"""From a few requests to more rows than memory can feed, and one batch that shares nothing."""


class Sample(NamedTuple):
    """One measured batch, in the terms of the cost model."""

    time_us: float
    kv_bytes: float
    """Distinct keys and values."""
    state_bytes: float
    """States written and read."""
    start_bytes: float
    """Items, each as many bytes as one KV token of one kv head has."""


def candidates(capability: tuple[int, int], head_size: int, kv_bytes: int) -> list[KernelConfig]:
    """The shipped configuration of this or the next older architecture, and its neighbours."""
    shipped = shipped_for(capability).for_kv_bytes(kv_bytes)
    names = (
        "small_rows", "large_rows", "tile_tokens", "num_warps", "num_stages", "programs_per_sm",
        "large_stages",
    )  # fmt: skip
    neighbours = [
        (16, 64, 64, 8, 3, 1),
        (64, 128, 64, 8, 3, 1),
        (64, 128, 64, 8, 4, 1),
        (16, 128, 64, 8, 3, 1),
        (128, 128, 64, 8, 3, 1),
        (64, 64, 64, 4, 3, 1),
        (64, 64, 32, 4, 3, 2),
        (64, 64, 32, 4, 4, 2),
        (16, 64, 32, 4, 3, 2),
        (16, 64, 64, 4, 3, 1),
        # the products of one program beside what the other does in between
        (16, 64, 64, 4, 3, 2, 2),
        (16, 64, 32, 4, 2, 2),
        (64, 64, 64, 4, 2, 2),
        (16, 16, 32, 2, 4, 4),
    ]
    configs = [replace(shipped, **dict(zip(names, each, strict=False))) for each in neighbours]
    found = [shipped.for_head_size(head_size)]
    found += [each.for_kv_bytes(kv_bytes).for_head_size(head_size) for each in configs]
    return list(dict.fromkeys(found))


def calibrate(samples: Iterable[Sample]) -> tuple[float, float]:
    """`state_cost` and `start_tokens` of a configuration, by least squares over batches.

    time = (kv_bytes + state_cost * state_bytes + start_tokens * start_bytes) / bandwidth + launch,
    with nothing below zero and relative errors.

    Raises:
        ValueError: the times do not grow with the bytes.
    """
    times_us, *num_bytes = np.array(list(samples)).T
    terms = (np.array([*num_bytes, np.ones(len(times_us))]) / times_us).T
    norms = np.maximum(np.abs(terms).max(axis=0), 1e-30)
    solution = _least_squares_from_zero(terms / norms, np.ones(len(times_us))) / norms
    per_kv_byte, per_state_byte, per_start_byte, _ = solution
    if per_kv_byte <= 0:
        raise ValueError("the times of the batches do not grow with their bytes: measure again")
    state_cost = float(np.clip(per_state_byte / per_kv_byte, MIN_STATE_COST, MAX_STATE_COST))
    return state_cost, float(np.clip(per_start_byte / per_kv_byte, 0, MAX_START_TOKENS))


def _least_squares_from_zero(terms: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Least squares without negative solutions: the best of all choices of terms left at zero."""
    found = [
        np.linalg.lstsq(terms * chosen, values, rcond=None)[0] * chosen
        for chosen in itertools.product((0, 1), repeat=terms.shape[1])
    ]
    found = [solution for solution in found if (solution >= 0).all()]
    return min(found, key=lambda solution: np.square(terms @ solution - values).sum())


class Bench:
    """Batches of one shape on a device, measured with any configuration."""

    def __init__(self, shape: Shape, device: torch.device | str, loads: tuple[Load, ...]) -> None:
        self.shape, self.loads, self.device = shape, loads, torch.device(device)
        self.max_requests = max(load.requests for load in loads)
        randn = functools.partial(
            torch.randn,
            generator=torch.Generator(self.device).manual_seed(0),
            dtype=shape.dtype,
            device=self.device,
        )
        # shorter prefixes may end within blocks: one more for each request
        num_blocks = 1 + max(int(self.batch(load)[0].max()) for load in loads) + self.max_requests
        kv = randn((num_blocks, shape.block_size, shape.num_kv_heads, 2 * shape.head_size))
        self.kv_cache = kv.to(shape.kv_dtype).transpose(1, 2)  # as vLLM lays it out
        self.query = randn((self.max_requests, shape.num_heads, shape.head_size))
        self.one = torch.ones(1, device=self.device)
        flush_bytes = L2_FLUSH_BYTES if self.device.type == "cuda" else 1
        self._flush = torch.empty(flush_bytes, dtype=torch.int8, device=self.device)

    def batch(self, load: Load) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """block_table, query_start_loc and seq_lens."""
        size = self.shape.block_size
        prefix_blocks = load.prefix_tokens // size
        context_blocks = -(-(load.prefix_tokens % size + load.context_tokens) // size)
        group = np.arange(load.requests) % load.groups
        shared = 1 + group[:, None] * prefix_blocks + np.arange(prefix_blocks)
        first_own = 1 + load.groups * prefix_blocks
        own = first_own + np.arange(load.requests * context_blocks).reshape(load.requests, -1)
        table = np.concatenate((shared, own), axis=1).astype(np.int32)
        seq_lens = np.full(load.requests, load.prefix_tokens + load.context_tokens, np.int32)
        starts = np.arange(load.requests + 1, dtype=np.int32)
        return table, starts, seq_lens

    def planner(self, config: KernelConfig) -> StepPlanner:
        shape, most = self.shape, self.max_requests
        layer = LayerShape(
            shape.num_heads, shape.num_kv_heads, shape.head_size, shape.kv_dtype.itemsize
        )
        return StepPlanner(
            PlannerLimits(
                max_requests=most,
                max_tokens=most,
                max_seq_len=max(load.prefix_tokens + load.context_tokens for load in self.loads),
            ),
            setup_for(self.device, layer, config),
            device=self.device,
        )

    def attend(
        self, planner: StepPlanner, load: Load, *, sharing: str | None = "auto"
    ) -> Callable[[], None]:
        """Plans a batch, and returns what runs its attention into `out`, an attribute of this.

        Args:
            sharing: "auto" for what pays, "all" for everything, None for nothing.
        """
        table, query_start_loc, seq_lens = self.batch(load)
        size = self.shape.block_size
        forest = forest_for(
            build_forest(table, seq_lens, size) if sharing == "all" else sharing,
            table,
            np.diff(query_start_loc),
            seq_lens,
            block_size=size,
            group_size=planner.setup.group_size,
            cost=planner.setup.cost,
        )
        self.shared, plan = planner.plan_step(forest, query_start_loc, seq_lens)
        planner.hold(plan)
        planner.begin_step(upload(seq_lens, self.device))
        block_table = upload(table, self.device)
        query = self.query[: load.requests]
        out = torch.empty_like(query)

        def run() -> None:
            self.out = out
            relay_attention(
                query,
                self.kv_cache,
                block_table,
                planner.plan,
                out,
                scale=self.shape.head_size**-0.5,
                k_scale=self.one,
                v_scale=self.one,
            )

        return run

    def is_invariant(self, planner: StepPlanner) -> bool:
        """Whether grouped and alone give the same bits on this device, for every batch."""
        for load in self.loads:
            self.attend(planner, load, sharing=None)()
            alone = self.out
            self.attend(planner, load, sharing="all")()
            if not torch.equal(alone, self.out):
                return False
        return True

    def time_us(self, run: Callable[[], None]) -> float:
        """Median time of both launches, replayed as a CUDA graph, from an empty L2 cache."""
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        times_us = []
        for _ in range(REPEATS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flush.zero_()
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times_us.append(begin.elapsed_time(end) * 1e3)
        return statistics.median(times_us)

    def sample(self, planner: StepPlanner, load: Load, time_us: float) -> Sample:
        """The last planned batch in the terms of the cost model."""
        shape = self.shape
        token_bytes = 2 * shape.head_size * shape.kv_dtype.itemsize
        assert planner.held is not None
        tokens = load.requests * load.context_tokens
        shares = len(self.shared.nodes) > 0
        tokens += (load.groups if shares else load.requests) * load.prefix_tokens
        items, slots = len(planner.held.items), planner.held.num_slots
        state_bytes = 2 * 4 * (shape.head_size + 2)
        return Sample(
            time_us=time_us,
            kv_bytes=float(tokens * shape.num_kv_heads * token_bytes),
            state_bytes=float(slots * shape.num_heads * state_bytes),
            start_bytes=float(items * shape.num_kv_heads * token_bytes),
        )


@dataclass(frozen=True)
class Result:
    """One candidate on all batches."""

    config: KernelConfig
    times_us: tuple[float, ...]
    """Empty if it could not be compiled or launched."""
    is_invariant: bool
    reason: str = ""

    @property
    def mean_us(self) -> float:
        """Geometric mean."""
        return statistics.geometric_mean(self.times_us) if self.times_us else float("inf")


def measure(bench: Bench, configs: Iterable[KernelConfig]) -> Iterator[Result]:
    """Every candidate, one after the other."""
    for config in configs:
        try:
            planner = bench.planner(config)
            invariant = bench.is_invariant(planner)
            times_us = tuple(bench.time_us(bench.attend(planner, load)) for load in bench.loads)
        except Exception as error:  # too much shared memory for this GPU, say: the next one
            yield Result(config, (), False, f"{type(error).__name__}: {error}".splitlines()[0])
        else:
            yield Result(config, times_us, invariant)


def best_of(results: Iterable[Result]) -> Result:
    """The fastest candidate whose results do not depend on the grouping.

    Raises:
        RuntimeError: there is none; with what went wrong for each.
    """
    results = list(results)
    usable = [result for result in results if result.times_us and result.is_invariant]
    if not usable:
        raise RuntimeError(
            "no kernel configuration works on this GPU: "
            + "; ".join(sorted({result.reason or "grouping changes bits" for result in results}))
        )
    return min(usable, key=lambda result: result.mean_us)


def with_costs(bench: Bench, config: KernelConfig) -> KernelConfig:
    """The configuration with the costs that this device shows."""
    planner = bench.planner(config)
    samples = []
    for load in bench.loads:
        for sharing in ("all", None):
            # half a segment more: states of tiles
            for extra_tokens in (0, config.segment_tokens // 2):
                moved = replace(
                    load,
                    prefix_tokens=max(load.prefix_tokens - extra_tokens, bench.shape.block_size),
                )
                run = bench.attend(planner, moved, sharing=sharing)
                samples.append(bench.sample(planner, moved, bench.time_us(run)))
    state_cost, start_tokens = calibrate(samples)
    return replace(config, state_cost=round(state_cost, 3), start_tokens=round(start_tokens, 1))

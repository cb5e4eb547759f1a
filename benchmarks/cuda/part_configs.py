# SPDX-License-Identifier: Apache-2.0
"""Candidates for the configuration that ships, each beside the one that does."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch

from benchmarks.attention.batches import Batch, shared_prefix
from benchmarks.cuda.forests import Trees, shuffled
from benchmarks.cuda.geometry import Geometry
from benchmarks.cuda.inputs import DeviceBatch, Inputs, Relay
from benchmarks.cuda.part_grid import TINY_GEOMETRY
from benchmarks.cuda.reference import rows_that_differ
from benchmarks.cuda.run import Run, geometric_mean
from benchmarks.cuda.variants import Variant
from benchmarks.support.formatting import Row
from benchmarks.support.timing import ratio
from vllm_relay.attention_backends.cuda.config import KernelConfig

LLAMA = Geometry(32, 8)
MakeBatch = Callable[[int], Batch]
BATCHES: list[tuple[Geometry, MakeBatch]] = [
    (LLAMA, lambda block_size: shared_prefix(8, 4000, 128, block_size)),
    (LLAMA, lambda block_size: shared_prefix(32, 2048, 128, block_size)),
    (LLAMA, lambda block_size: shared_prefix(128, 8192, 256, block_size)),
    (LLAMA, lambda block_size: shared_prefix(64, 0, 4096, block_size)),
    (LLAMA, Trees((4, 16, 64), (4096, 512, 256)).batch),
    (Geometry(32, 32), lambda block_size: shared_prefix(64, 8192, 512, block_size)),
    (Geometry(64, 8), lambda block_size: shared_prefix(256, 4096, 128, block_size)),
]
TINY_BATCHES: list[tuple[Geometry, MakeBatch]] = [
    (TINY_GEOMETRY, Trees((1, 3), (48, 32)).batch),
]
CHANGES: list[dict[str, Any]] = [
    {"large_rows": 128},
    {"small_rows": 64, "large_rows": 128},
    {"small_rows": 64},
    {"small_rows": 32},
    {"num_stages": 2},
    {"num_stages": 4},
    {"num_warps": 4},
    {"num_warps": 4, "programs_per_sm": 2},
    {"num_warps": 4, "large_stages": 2, "programs_per_sm": 2},
    {"large_rows": 32, "num_warps": 4},
    {"large_rows": 128, "num_stages": 2},
    {"small_rows": 32, "large_rows": 128},
    {"num_stages": 1},
    {"tile_tokens": 32},
    {"tile_tokens": 32, "num_stages": 4},
    {"tile_tokens": 128},
    {"tile_tokens": 128, "num_stages": 2},
    {"tile_tokens": 128, "large_rows": 128},
    {"segment_tokens": 256},
    {"segment_tokens": 1024},
    {"segment_tokens": 1024, "section_tokens": 8192},
    {"start_tokens": 0.0},
    {"start_tokens": 128.0},
    {"start_tokens": 256.0},
    {"state_cost": 1.0},
    {"state_cost": 2.0},
]
ROUNDS = 5


def variants(run: Run) -> list[Variant]:
    candidates = _candidates(run).values()
    geometries = dict.fromkeys(geometry for geometry, _ in _batches(run))
    return [
        run.variant(geometry, config, rivals=False)
        for config in candidates
        for geometry in geometries
    ]


def measure(run: Run) -> None:
    base = run.config(LLAMA)
    rows: list[Row] = []
    try:
        for name, config in run.in_time(_candidates(run).items(), "candidates", 2.0):
            run.result.doing(name)
            rows.append({"candidate": name} | _measure_candidate(run, base, config))
    finally:
        rows.sort(key=lambda row: _sortable(row["mean over what ships"]))
        run.result.add_table(
            "Time over that of what ships",
            rows,
            f"What ships for this GPU: {_shown(base)}. L2 flushed, candidate and base in turn. "
            "Bits: query tokens in which sharing everything and sharing nothing differ.",
        )
        if rows and run.device.measured:
            best = rows[0]
            run.result.add_finding(
                f"best candidate: {best['candidate']}, {_show(best['mean over what ships'])} of "
                "the time of what ships"
            )
        mixed = [row["candidate"] for row in rows if row["bits differ"]]
        run.result.add_finding(
            "bits depend on grouping with " + "; ".join(mixed) if mixed
            else "bits do not depend on grouping with any candidate that ran"
        )  # fmt: skip


def _measure_candidate(run: Run, base: KernelConfig, config: KernelConfig) -> Row:
    """Its times over those of `base`, batch by batch; what does not run is left out."""
    ratios: dict[str, Any] = {}
    bits: int | None = None
    failure = ""
    made: tuple[Geometry, Relay, Relay] | None = None
    for geometry, make_batch in _batches(run):
        batch = shuffled(make_batch(geometry.block_size))
        title = f"{geometry.heads}: {batch.description}"
        ratios[title] = float("nan")
        if failure or not run.pool.holds(geometry, batch.num_blocks):
            continue
        if made is None or made[0] != geometry:
            made = None  # gives the buffers back before others are made
            made = (
                geometry, run.relay(geometry, config), run.relay(geometry, base)
            )  # fmt: skip
        _, relay, shipped = made
        cache = run.pool.cache(geometry, batch.num_blocks)
        inputs = Inputs.of(
            DeviceBatch.upload(batch, relay.limits, run.device.device), geometry, cache
        )
        try:
            bits = (bits or 0) + _differing_bits(relay, inputs)
            calls = {}
            for name, one in (("candidate", relay), ("base", shipped)):
                one.plan(inputs.batch)
                calls[name] = one.call(inputs)
            times = run.device.compare(calls, flushed=True, rounds=ROUNDS)
            ratios[title] = ratio(times["candidate"], times["base"])
        except Exception as error:
            if not run.device.is_alive():
                raise
            failure = f"{type(error).__name__}: {error}"[:200]
    mean = float("nan") if failure else geometric_mean(ratios.values())
    if failure:
        run.result.leave_out(f"{_shown(config)}: {failure}")
    return {"mean over what ships": mean, "bits differ": bits, **ratios}


def _differing_bits(relay: Relay, inputs: Inputs) -> int:
    """Query tokens in which sharing everything and sharing nothing differ."""
    outputs = []
    for everything in (True, False):
        out = torch.full_like(inputs.query, torch.nan)
        relay.poison()
        relay.plan(inputs.batch, shares=everything, everything=everything)
        relay.attend(inputs, out)
        outputs.append(out)
    return rows_that_differ(*outputs)


def _candidates(run: Run) -> dict[str, KernelConfig]:
    """By what they change; those that come out as what ships are left out."""
    base = run.config(LLAMA)
    changes = run.choose(CHANGES, CHANGES[:10], [{"small_rows": 32}])
    candidates: dict[str, KernelConfig] = {}
    for change in changes:
        try:
            config = replace(base, **change)
        except ValueError:
            continue  # does not fit what ships for this GPU
        if config != base and config not in candidates.values():
            name = ", ".join(f"{field} {value}" for field, value in change.items())
            candidates[name] = config
    return candidates


def _batches(run: Run) -> list[tuple[Geometry, MakeBatch]]:
    return run.choose(BATCHES, BATCHES[:5], TINY_BATCHES)


def _shown(config: KernelConfig) -> str:
    return ", ".join(f"{each.name} {getattr(config, each.name)}" for each in fields(config))


def _sortable(mean: Any) -> float:
    """What did not run comes last."""
    return mean if isinstance(mean, float) and mean == mean else float("inf")


def _show(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)

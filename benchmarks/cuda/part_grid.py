# SPDX-License-Identifier: Apache-2.0
"""One shared prefix, over batch, prefix, context and heads: time against the limit of the GPU."""

from dataclasses import dataclass
from itertools import product

from benchmarks.attention.batches import shared_prefix
from benchmarks.cuda.forests import shuffled
from benchmarks.cuda.geometry import LAUNCH_US, Geometry, Limit
from benchmarks.cuda.inputs import DeviceBatch, Inputs, Relay
from benchmarks.cuda.run import Comparison, Run, geometric_mean
from benchmarks.cuda.variants import Variant
from benchmarks.support.formatting import Row
from benchmarks.support.result import Goal

GEOMETRIES = [Geometry(32, 8), Geometry(64, 8), Geometry(32, 32)]
TINY_GEOMETRY = Geometry(4, 2, 32)
CONTEXTS_TOKENS = (128, 512)
PREFIXES_TOKENS = (2048, 8192, 512, 32768)
BATCHES = (32, 128, 8, 256, 64)
"""The most telling first: what there is no time for is at the end."""
LONGEST_RIVAL_S = 4e-3
"""Rivals that need longer are not timed here."""
LONG_US = 100.0
"""A limit beyond which launches do not matter."""


@dataclass(frozen=True)
class Cell:
    geometry: Geometry
    requests: int
    prefix_tokens: int
    context_tokens: int


def geometries(run: Run) -> list[Geometry]:
    return run.choose(GEOMETRIES, GEOMETRIES[:2], [TINY_GEOMETRY])


def variants(run: Run) -> list[Variant]:
    return [run.variant(geometry) for geometry in geometries(run)]


def cells(run: Run) -> list[Cell]:
    contexts = run.choose(CONTEXTS_TOKENS, CONTEXTS_TOKENS[:1], (16,))
    prefixes = run.choose(PREFIXES_TOKENS, PREFIXES_TOKENS[:2], (64,))
    batches = run.choose(BATCHES, BATCHES[:4], (3,))
    return [
        Cell(geometry, requests, prefix, context)
        for context, prefix, requests, geometry in product(
            contexts, prefixes, batches, geometries(run)
        )
    ]


def measure(run: Run) -> None:
    relays: dict[Geometry, Relay] = {}
    rows: list[Row] = []
    try:
        for cell in run.in_time(cells(run), "cells", 0.5):
            with run.tolerating(str(cell)):
                rows += _measure_cell(run, cell, relays)
    finally:
        _report(run, rows)


def _measure_cell(run: Run, cell: Cell, relays: dict[Geometry, Relay]) -> list[Row]:
    geometry = cell.geometry
    batch = shared_prefix(
        cell.requests, cell.prefix_tokens, cell.context_tokens, geometry.block_size
    )
    run.result.doing(f"{geometry.heads}: {batch.description}")
    if not run.pool.holds(geometry, batch.num_blocks):
        run.result.leave_out(f"{geometry.heads}, {batch.description}: does not fit in memory")
        return []
    batch = shuffled(batch)
    if geometry not in relays:
        relays[geometry] = run.relay(geometry)
    relay = relays[geometry]
    cache = run.pool.cache(geometry, batch.num_blocks)
    inputs = Inputs.of(DeviceBatch.upload(batch, relay.limits, run.device.device), geometry, cache)
    relay.plan(inputs.batch)
    call = relay.call(inputs)
    out = call()
    limit = Limit.of(geometry, batch, run.ceilings)
    unshared_s = geometry.bytes_moved(batch, shared_once=False) / run.ceilings.bytes_per_s
    rivals = {}
    if not unshared_s > LONGEST_RIVAL_S:
        rivals = run.rivals.agreeing(inputs, out)
    flushed = Comparison.measure(run.device, call, rivals, flushed=True, rounds=7)
    best = {} if flushed.best is None else {flushed.best: rivals[flushed.best]}
    warm = Comparison.measure(run.device, call, best, flushed=False, rounds=5)
    row = {
        "heads": geometry.heads,
        "batch": cell.requests,
        "prefix": cell.prefix_tokens,
        "context": cell.context_tokens,
        "limit us": limit.us,
        "bound by": limit.bound_by,
        "flushed us": flushed.us,
        "warm us": warm.us,
        "(limit + 6 us) / flushed": (limit.us + LAUNCH_US) / flushed.us,
        "limit / flushed": limit.us / flushed.us,
        "TFLOP/s": geometry.flops(batch) / flushed.us / 1e6,
        "rival": flushed.best or "none",
        "rival us": flushed.best_us,
        "speed-up": flushed.speedup,
        "speed-up, warm": warm.speedup,
    }
    return [row]


def _report(run: Run, rows: list[Row]) -> None:
    run.result.add_table(
        "One shared prefix",
        rows,
        "Both launches in a CUDA graph, L2 flushed before each call or as the call before left it. "
        "The limit is bytes over the bandwidth of a copy or multiplications over the rate of a "
        "matrix product, whichever is longer. Rivals that would need longer than "
        f"{LONGEST_RIVAL_S * 1e3:g} ms are not timed.",
    )
    long = [row for row in rows if row["limit us"] > LONG_US]
    memory = [row for row in long if row["bound by"] == "memory"]
    compute = [row for row in long if row["bound by"] == "compute"]
    goals = [
        (f"(limit + 6 us) / time, mean of {len(rows)} cells", "(limit + 6 us) / flushed", rows,
         0.45, 0.65, "x"),
        (f"limit / time where memory binds and the limit is > 100 us, mean of {len(memory)} cells",
         "limit / flushed", memory, 0.70, 0.85, "x"),
        (f"TFLOP/s where multiplying binds and the limit is > 100 us, mean of {len(compute)} cells",
         "TFLOP/s", compute, 350.0, 500.0, "TFLOP/s"),
    ]  # fmt: skip
    for what, column, of, bar, aim, unit in goals:
        value = geometric_mean(row[column] for row in of)
        run.result.add_goal(Goal(what, value, bar, aim, unit=unit))
    for column, of in (("limit / flushed", memory), ("TFLOP/s", compute)):
        if of and run.device.measured:
            worst = min(of, key=lambda row: row[column])
            run.result.add_finding(
                f"worst {column} with a limit > 100 us: {worst[column]:.3g} at {worst['heads']}, "
                f"batch {worst['batch']}, prefix {worst['prefix']}, context {worst['context']}"
            )
    multiplying = [row["TFLOP/s"] for row in rows if row["bound by"] == "compute"]
    if multiplying and run.device.measured:
        run.result.add_finding(
            f"TFLOP/s where multiplying binds, with any limit: {min(multiplying):.0f} to "
            f"{max(multiplying):.0f}, mean {geometric_mean(multiplying):.0f}"
        )
    speedup = geometric_mean(row["speed-up"] for row in rows)
    if speedup == speedup:
        run.result.add_finding(
            f"over the best rival, where timed: {speedup:.2f} times as fast on average"
        )

# SPDX-License-Identifier: Apache-2.0
"""FlashAttention over what requests share, against FlashAttention as it is, relay's kernels, and
cascades of others."""

import math

from benchmarks.attention.batches import shared_prefix
from benchmarks.cuda.baselines import FlashAttention3
from benchmarks.cuda.cascades import FlashAttention3Cascade, FlashInferCascade
from benchmarks.cuda.flash_nodes import prepare
from benchmarks.cuda.forests import shuffled
from benchmarks.cuda.geometry import Geometry, Limit
from benchmarks.cuda.inputs import DeviceBatch, Inputs
from benchmarks.cuda.part_grid import Cell, cells
from benchmarks.cuda.part_grid import variants as variants
from benchmarks.cuda.rivals import CLOSE
from benchmarks.cuda.run import RELAY, Comparison, Run, geometric_mean, least
from benchmarks.support.formatting import Row
from benchmarks.support.result import Goal

NODES = "FlashAttention 3 over nodes"
IN_TURN = "FlashAttention 3 over nodes, tails after nodes"
ASIDE, LEFT_SMS = "FlashAttention 3 over nodes, on two thirds of the GPU", 44
CAPTURED = "FlashAttention 3 over nodes, as captured"
FLASHINFER = "FlashInfer cascade"
CASCADES = {
    FlashAttention3Cascade.name: [FlashAttention3Cascade.name],
    FLASHINFER: [FlashInferCascade.name(backends) for backends in FlashInferCascade.BACKENDS],
}
"""The ways to run each; its time is that of the fastest."""


def measure(run: Run) -> None:
    flash = run.rivals.found.get(FlashAttention3.name)
    if flash is None:
        run.result.leave_out(f"{FlashAttention3.name} is missing")
        return
    rows: list[Row] = []
    try:
        for cell in run.in_time(cells(run), "cells", 0.5):
            with run.tolerating(str(cell)):
                rows += _measure_cell(run, cell, flash)
    finally:
        _report(run, rows)


def _measure_cell(run: Run, cell: Cell, flash: FlashAttention3) -> list[Row]:
    geometry: Geometry = cell.geometry
    batch = shared_prefix(
        cell.requests, cell.prefix_tokens, cell.context_tokens, geometry.block_size
    )
    run.result.doing(f"{geometry.heads}: {batch.description}")
    if not run.pool.holds(geometry, batch.num_blocks):
        run.result.leave_out(f"{geometry.heads}, {batch.description}: does not fit in memory")
        return []
    batch = shuffled(batch)
    relay = run.relay(geometry)
    cache = run.pool.cache(geometry, batch.num_blocks)
    inputs = Inputs.of(DeviceBatch.upload(batch, relay.limits, run.device.device), geometry, cache)
    relay.plan(inputs.batch)
    call = relay.call(inputs)
    expected = call().float()
    contenders = {FlashAttention3.name: flash.prepare(inputs)}
    for name, options in (
        (NODES, {}),
        (IN_TURN, {"in_branches": False}),
        (ASIDE, {"node_options": {"left_sms": LEFT_SMS}}),
        (CAPTURED, {"is_captured": True}),
    ):
        contenders[name] = prepare(
            inputs, flash.varlen, flash.schedule, piece_tokens=None, **options
        )
    for name, contender in contenders.items():
        error = float((contender().float() - expected).abs().max() / expected.abs().max())
        if not error <= CLOSE:
            raise ValueError(f"{name} differs by {error:.2g} of the largest output")
    contenders |= run.rivals.agreeing(inputs, expected, cascades=True)
    times = Comparison.measure(run.device, call, contenders, flushed=True, rounds=7).times
    us = {name: timing.median_s * 1e6 for name, timing in times.items()}
    nodes_us = us[NODES]
    timed = [way for way in CASCADES[FLASHINFER] if way in us]
    backends = min(timed, key=lambda way: us[way], default="none")
    cascades_us = {
        name: least(us.get(way, math.nan) for way in ways) for name, ways in CASCADES.items()
    }
    limit = Limit.of(geometry, batch, run.ceilings)
    return [
        {
            "heads": geometry.heads,
            "batch": cell.requests,
            "prefix": cell.prefix_tokens,
            "context": cell.context_tokens,
            "limit us": limit.us,
            "FlashAttention us": us[FlashAttention3.name],
            "nodes us": nodes_us,
            "tails after nodes us": us[IN_TURN],
            f"{LEFT_SMS} multiprocessors left to tails us": us[ASIDE],
            "as captured us": us[CAPTURED],
            "Triton us": us[RELAY],
            **{f"{name} us": time_us for name, time_us in cascades_us.items()},
            "fastest of FlashInfer": backends.removeprefix(f"{FLASHINFER}, "),
            "limit / nodes": limit.us / nodes_us,
            "FlashAttention / nodes": us[FlashAttention3.name] / nodes_us,
            "Triton / nodes": us[RELAY] / nodes_us,
            **{f"{name} / nodes": time_us / nodes_us for name, time_us in cascades_us.items()},
            "best cascade / nodes": least(cascades_us.values()) / nodes_us,
        }
    ]


def _report(run: Run, rows: list[Row]) -> None:
    run.result.add_table(
        "FlashAttention over nodes",
        rows,
        "One shared prefix. Both calls of FlashAttention 3, the copy of queries and the merge in a "
        "CUDA graph, L2 flushed before each; tables and the schedule of tails are made before, as "
        "in a step. A captured step has room for all nodes that another may have. FA3 cascade: a "
        "call for the prefix, one for the rest and vLLM's Triton merge, schedules made before. "
        "FlashInfer cascade: MultiLevelCascadeAttentionWrapper of two levels on the same cache, "
        "planned before for this batch, with the fastest of the backends that it offers for the "
        "prefix and the rest; it takes auto, which is fa3 on compute capability 9.0.",
    )
    for name in [way for ways in CASCADES.values() for way in ways]:
        if (state := run.rivals.states[name]) != "found":
            run.result.leave_out(f"{name}: {state}")
    large = [row for row in rows if row["batch"] == 128 and row["prefix"] == 8192]
    for what, column, of, bar, aim in (
        (f"limit / time, mean of {len(rows)} cells", "limit / nodes", rows, 0.55, 0.70),
        ("FlashAttention over nodes against as it is, batch 128, prefix 8,192",
         "FlashAttention / nodes", large, 3.0, 5.0),
        ("the better cascade of others over nodes", "best cascade / nodes", rows, 1.1, 1.5),
        *((f"{name} over nodes", f"{name} / nodes", rows, 1.1, 1.5) for name in CASCADES),
    ):  # fmt: skip
        value = geometric_mean(row[column] for row in of)
        run.result.add_goal(Goal(what, value, bar, aim, unit="x"))

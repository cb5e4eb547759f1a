# SPDX-License-Identifier: Apache-2.0
"""The plan of a step: time on the host, and that nothing waits for the device."""

import math

import torch

from benchmarks.attention.batches import block_tables, shared_prefix
from benchmarks.cuda.device import host_us
from benchmarks.cuda.geometry import Geometry
from benchmarks.cuda.inputs import DeviceBatch, Inputs, Relay
from benchmarks.cuda.part_grid import TINY_GEOMETRY
from benchmarks.cuda.run import Run
from benchmarks.cuda.variants import Variant
from benchmarks.support.formatting import Row
from benchmarks.support.result import Goal

GEOMETRY = Geometry(32, 8)
ROUNDS = 10


def variants(run: Run) -> list[Variant]:
    geometry = _geometry(run)
    return [run.variant(geometry, rivals=False)]


def measure(run: Run) -> None:
    relay = run.relay(_geometry(run))
    try:
        _measure_steps(run, relay)
    except ImportError as error:
        run.result.leave_out(f"planning as an engine does: {error}")
    _check_synchronisation(run, relay)


def _measure_steps(run: Run, relay: Relay) -> None:
    from benchmarks.attention.bench_planning_gpu import WAYS, measured

    requests, blocks = run.choose((1024, 2048), (1024, 2048), (8, 12))
    rows: list[Row] = []
    for name, table in run.in_time(block_tables(requests, blocks).items(), "block tables", 1.5):
        run.result.doing(f"planning, {name}")
        for way in WAYS:
            with run.tolerating(f"planning, {name}, {way}"):
                times = measured(way, table, ROUNDS, relay.planner.setup, run.device.device)
                us = {
                    step: planning.median_s * 1e6 if run.device.measured else math.nan
                    for step, (planning, _) in times.items()
                }
                rows.append(
                    {"block tables": name, "kernels": way}
                    | {f"{step}, us": each for step, each in us.items()}
                    | {"slowest, us": max(us.values())}
                )
    run.result.add_table(
        f"Planning one step of {requests} requests of {blocks} blocks, for all layers",
        rows,
        "Host time until the plan's copy is ordered: groups, and nodes or work list. A plan serves "
        "16 tokens and more, until a request begins or ends.",
    )
    worst = max((row["slowest, us"] for row in rows), default=math.nan)
    run.result.add_goal(
        Goal("planning, host time, slowest batch", worst, 1_000.0, 500.0, True, unit="us")
    )


def _check_synchronisation(run: Run, relay: Relay) -> None:
    """Plans and attends where torch raises an error for whatever waits for the device."""
    geometry = _geometry(run)
    batch = shared_prefix(*run.choose((64, 2048, 128), (64, 2048, 128), (3, 32, 16)),
                          geometry.block_size)  # fmt: skip
    cache = run.pool.cache(geometry, batch.num_blocks)
    inputs = Inputs.of(DeviceBatch.upload(batch, relay.limits, run.device.device), geometry, cache)
    out = torch.empty_like(inputs.query)

    def step() -> None:
        relay.plan(inputs.batch)
        relay.attend(inputs, out)

    step()
    run.device.synchronize()
    waits = 0.0
    if run.device.measured:
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        except RuntimeError as error:
            waits = 1.0
            run.result.add_finding(f"planning or attention waits for the device: {error}")
        finally:
            torch.cuda.set_sync_debug_mode("default")
    host = host_us(step, run.device)
    run.result.add_finding(
        "plan and attention of a step: "
        + ("nothing waits for the device" if run.device.measured else "waiting was not checked")
        + (f"; the host spends {host:.0f} us on its launches" if host == host else "")
    )
    run.result.add_goal(
        Goal("calls that wait for the device", waits, 0.0, lower_is_better=True, unit="calls")
    )


def _geometry(run: Run) -> Geometry:
    return run.choose(GEOMETRY, GEOMETRY, TINY_GEOMETRY)

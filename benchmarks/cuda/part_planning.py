# SPDX-License-Identifier: Apache-2.0
"""The plan of a step: time on the host, and that nothing waits for the device."""

import math
from functools import partial

import numpy as np
import torch

from benchmarks.attention.batches import Batch, shared_prefix
from benchmarks.cuda.device import host_us
from benchmarks.cuda.forests import Trees, shuffled
from benchmarks.cuda.geometry import Geometry
from benchmarks.cuda.inputs import DeviceBatch, Inputs, Relay
from benchmarks.cuda.part_grid import TINY_GEOMETRY
from benchmarks.cuda.run import Run
from benchmarks.cuda.variants import Variant
from benchmarks.support.formatting import Row
from benchmarks.support.result import Goal

GEOMETRY = Geometry(32, 8)
BLOCKS_PER_REQUEST = 2048


def variants(run: Run) -> list[Variant]:
    geometry = _geometry(run)
    return [run.variant(geometry, rivals=False)]


def batches(run: Run) -> dict[str, Batch]:
    """By name, all of the same numbers of requests and of blocks per request."""
    block_size = _geometry(run).block_size
    requests, blocks = run.choose((1024, BLOCKS_PER_REQUEST), (1024, BLOCKS_PER_REQUEST), (8, 12))
    roots, levels = run.choose((64, 6), (64, 6), (2, 3))
    tokens = blocks * block_size
    half = blocks // 2 * block_size
    step = blocks // levels * block_size
    bits = math.log2(requests) / (levels - 1)
    nodes = tuple(1 << round(level * bits) for level in range(levels))
    last = tokens - (levels - 1) * step
    return {
        "one prefix": shared_prefix(requests, half, tokens - half, block_size),
        f"{roots} prefixes": Trees((roots, requests), (half, tokens - half)).batch(block_size),
        f"{levels}-level tree": Trees(nodes, (step,) * (levels - 1) + (last,)).batch(block_size),
        "nothing shared": shared_prefix(requests, 0, tokens, block_size),
    }


def measure(run: Run) -> None:
    geometry = _geometry(run)
    rows: list[Row] = []
    relay = None
    for name, batch in run.in_time(batches(run).items(), "batches", 1.0):
        run.result.doing(f"{name}: {batch.description}")
        relay = relay or run.relay(geometry)
        with run.tolerating(f"planning, {name}"):
            rows.append({"batch": name} | _measure_batch(run, relay, batch))
    run.result.add_table(
        "Planning one step anew, for all layers",
        rows,
        "Host time: groups, work list and the order to copy it. A plan serves 16 tokens and more, "
        "until a request begins or ends.",
    )
    worst = max((row["host us"] for row in rows), default=np.nan)
    run.result.add_goal(
        Goal("planning, host time, slowest batch", worst, 1_000.0, 500.0, True, unit="us")
    )
    _check_synchronisation(run)


def _measure_batch(run: Run, relay: Relay, batch: Batch) -> Row:
    uploaded = DeviceBatch.upload(shuffled(batch), relay.limits, run.device.device)
    plan = partial(relay.plan, uploaded)
    apart = partial(relay.plan, uploaded, shares=False)
    return {
        "requests": batch.num_requests,
        "blocks per request": batch.block_table.shape[1],
        "host us": host_us(plan, run.device),
        "host us, told not to share": host_us(apart, run.device),
    }


def _check_synchronisation(run: Run) -> None:
    """Plans and attends where torch raises an error for whatever waits for the device."""
    geometry = _geometry(run)
    batch = shared_prefix(*run.choose((64, 2048, 128), (64, 2048, 128), (3, 32, 16)),
                          geometry.block_size)  # fmt: skip
    relay = run.relay(geometry)
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

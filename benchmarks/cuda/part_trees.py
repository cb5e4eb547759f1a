# SPDX-License-Identifier: Apache-2.0
"""Trees of 1 to 9 levels: time against the best unshared kernel."""

import math

from benchmarks.cuda.baselines import FlashAttention3
from benchmarks.cuda.flash_nodes import prepare
from benchmarks.cuda.forests import TREES, Trees, shuffled
from benchmarks.cuda.geometry import LAUNCH_US, Geometry, Limit
from benchmarks.cuda.inputs import DeviceBatch, Inputs, Relay
from benchmarks.cuda.part_grid import TINY_GEOMETRY
from benchmarks.cuda.part_nodes import NODES
from benchmarks.cuda.run import RELAY, Comparison, Run, geometric_mean, least
from benchmarks.cuda.variants import Variant
from benchmarks.support.formatting import Row
from benchmarks.support.result import Goal
from benchmarks.support.timing import ratio

GEOMETRIES = [Geometry(32, 8), Geometry(32, 32), Geometry(64, 8), Geometry(16, 8)]
TINY_TREES = (Trees((1, 2, 4), (64, 32, 16)), Trees((2, 2), (32, 16)))


def geometries(run: Run) -> list[Geometry]:
    return run.choose(GEOMETRIES, GEOMETRIES[:1], [TINY_GEOMETRY])


def variants(run: Run) -> list[Variant]:
    return [run.variant(geometry) for geometry in geometries(run)]


def measure(run: Run) -> None:
    relays: dict[Geometry, Relay] = {}
    rows: list[Row] = []
    trees = run.choose(TREES, TREES, TINY_TREES)
    cases = [(geometry, tree) for tree in trees for geometry in geometries(run)]
    try:
        for geometry, tree in run.in_time(cases, "trees", 0.6):
            with run.tolerating(f"{geometry.heads}, trees {tree}"):
                rows += _measure_tree(run, geometry, tree, relays)
    finally:
        run.result.add_table(
            "Trees",
            rows,
            "Nodes per level x tokens per node of that level; the leaves are the requests. L2 "
            "flushed before each call, in CUDA graphs. Relay has two ways, its own kernels and "
            "FlashAttention over nodes; speed-ups are over the fastest that shares nothing. The "
            "cascades of others read once what all requests of a batch begin with, if anything.",
        )
        alike = [row for row in rows if row["best cascade us"] == row["best cascade us"]]
        run.result.add_goal(
            Goal(
                f"the better cascade of others over nodes, mean of {len(alike)} trees of one root",
                geometric_mean(row["best cascade / nodes"] for row in alike),
                1.1,
                1.5,
            )
        )
        for what, column in (("Triton", "speed-up"), (NODES, "speed-up of nodes")):
            run.result.add_goal(
                Goal(
                    f"{what}: speed-up over the best unshared kernel, mean of {len(rows)} trees",
                    geometric_mean(row[column] for row in rows),
                    3.0,
                    5.0,
                )
            )


def _measure_tree(
    run: Run, geometry: Geometry, tree: Trees, relays: dict[Geometry, Relay]
) -> list[Row]:
    batch = shuffled(tree.batch(geometry.block_size))
    run.result.doing(f"{geometry.heads}: {batch.description}")
    if not run.pool.holds(geometry, batch.num_blocks):
        run.result.leave_out(f"{geometry.heads}, {batch.description}: does not fit in memory")
        return []
    if geometry not in relays:
        relays[geometry] = run.relay(geometry)
    relay = relays[geometry]
    cache = run.pool.cache(geometry, batch.num_blocks)
    inputs = Inputs.of(DeviceBatch.upload(batch, relay.limits, run.device.device), geometry, cache)
    relay.plan(inputs.batch)
    call = relay.call(inputs)
    rivals = run.rivals.agreeing(inputs, call(), sdpa=False)
    flash = run.rivals.found.get(FlashAttention3.name)
    nodes = {}
    if flash is not None:
        nodes = {NODES: prepare(inputs, flash.varlen, flash.schedule, piece_tokens=None)}
    cascades = run.rivals.agreeing(inputs, call(), cascades=True)
    contenders = {RELAY: call, **nodes, **rivals, **cascades}
    times = run.device.compare(contenders, flushed=True, rounds=5)
    nodes_time = times.pop(NODES, None)
    cascade_us = least(times.pop(name).median_s * 1e6 for name in cascades)
    compared = Comparison(times)
    limit = Limit.of(geometry, batch, run.ceilings)
    row = {
        "heads": geometry.heads,
        "tree": str(tree),
        "unique tokens": tree.unique_tokens,
        "KV tokens": batch.kv_tokens,
        "limit us": limit.us,
        "relay us": compared.us,
        "(limit + 6 us) / relay": (limit.us + LAUNCH_US) / compared.us,
        "rival": compared.best or "none",
        "rival us": compared.best_us,
        "speed-up": compared.speedup,
        "nodes us": math.nan if nodes_time is None else nodes_time.median_s * 1e6,
        "speed-up of nodes": math.nan
        if nodes_time is None or compared.best is None
        else ratio(times[compared.best], nodes_time),
        "best cascade us": cascade_us,
        "best cascade / nodes": math.nan
        if nodes_time is None
        else cascade_us / (nodes_time.median_s * 1e6),
    }
    return [row]

# SPDX-License-Identifier: Apache-2.0
"""A batch so small that launches are most of it: 8 requests, one kv head."""

from benchmarks.attention.batches import shared_prefix
from benchmarks.cuda.forests import shuffled
from benchmarks.cuda.geometry import Geometry, Limit
from benchmarks.cuda.inputs import DeviceBatch, Inputs
from benchmarks.cuda.part_grid import TINY_GEOMETRY
from benchmarks.cuda.run import Comparison, Run
from benchmarks.cuda.variants import Variant
from benchmarks.support.result import Goal

GEOMETRY = Geometry(8, 1)
REQUESTS, PREFIX_TOKENS, CONTEXT_TOKENS = 8, 4000, 128


def variants(run: Run) -> list[Variant]:
    return [run.variant(_geometry(run))]


def measure(run: Run) -> None:
    geometry = _geometry(run)
    sizes = run.choose(
        (REQUESTS, PREFIX_TOKENS, CONTEXT_TOKENS), (REQUESTS, PREFIX_TOKENS, CONTEXT_TOKENS),
        (3, 48, 20),
    )  # fmt: skip
    batch = shuffled(shared_prefix(*sizes, geometry.block_size))
    relay, apart = run.relay(geometry), run.relay(geometry)
    cache = run.pool.cache(geometry, batch.num_blocks)
    inputs = Inputs.of(DeviceBatch.upload(batch, relay.limits, run.device.device), geometry, cache)
    relay.plan(inputs.batch)
    apart.plan(inputs.batch, shares=False)
    call = relay.call(inputs)
    contenders = {"relay, nothing shared": apart.call(inputs)}
    contenders |= run.rivals.agreeing(inputs, call())
    flushed, warm = (
        Comparison.measure(run.device, call, contenders, flushed=flushed, rounds=25)
        for flushed in (True, False)
    )
    limit = Limit.of(geometry, batch, run.ceilings)
    rows = [
        {
            "kernel": name,
            "flushed us": flushed.times[name].median_s * 1e6,
            "warm us": warm.times[name].median_s * 1e6,
            "limit us": limit.us,
        }
        for name in flushed.times
    ]
    run.result.add_table(f"{geometry.heads} heads: {batch.description}", rows)
    run.result.add_goal(
        Goal(
            f"{geometry.heads} heads, {batch.description}: both launches, flushed",
            flushed.us,
            20.0,
            12.0,
            lower_is_better=True,
            unit="us",
        )  # fmt: skip
    )


def _geometry(run: Run) -> Geometry:
    return run.choose(GEOMETRY, GEOMETRY, TINY_GEOMETRY)

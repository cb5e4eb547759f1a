# SPDX-License-Identifier: Apache-2.0
"""How evenly the work of a step is dealt to the programs of an H200, by the model of costs."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator

import numpy as np

from benchmarks.attention.batches import Batch, shared_prefix
from benchmarks.cuda.cases import random_forest
from benchmarks.cuda.geometry import Geometry
from benchmarks.cuda.part_grid import BATCHES, CONTEXTS_TOKENS, GEOMETRIES, PREFIXES_TOKENS
from vllm_relay.attention_backends.cuda.config import KernelSetup, shipped_for
from vllm_relay.attention_backends.cuda.plans.plan import GpuPlan, plan_step
from vllm_relay.attention_backends.cuda.plans.plan_cuts import MODE_DIRECT
from vllm_relay.attention_backends.groups import find_groups

PROGRAMS = 132
WORST, MEAN = 1.3, 1.1
"""The most loaded program over its share, of any batch and on average."""


def grid() -> Iterator[tuple[Geometry, Batch]]:
    """The batches of `benchmarks.cuda`'s grid."""
    for context in CONTEXTS_TOKENS:
        for prefix in PREFIXES_TOKENS:
            for requests in BATCHES:
                for geometry in GEOMETRIES:
                    yield geometry, shared_prefix(requests, prefix, context, geometry.block_size)


def random_forests(count: int) -> Iterator[tuple[Geometry, Batch]]:
    """Those that `benchmarks.cuda` times."""
    for seed in range(count):
        geometry = GEOMETRIES[seed % len(GEOMETRIES)]
        yield (
            geometry,
            random_forest(
                np.random.default_rng(seed),
                block_size=geometry.block_size,
                max_requests=128,
                max_seq_len=34816,
                num_blocks=16384,
                max_kv_tokens=1_000_000,
            ),
        )


def planned(geometry: Geometry, batch: Batch) -> tuple[GpuPlan, KernelSetup]:
    setup = KernelSetup.of(shipped_for((9, 0)), geometry.layer, PROGRAMS)
    forest = find_groups(
        batch.block_table,
        np.diff(batch.query_start_loc),
        batch.seq_lens,
        block_size=batch.block_size,
        group_size=setup.group_size,
        cost=setup.cost,
    )
    _, plan = plan_step(forest, batch.query_start_loc, batch.seq_lens, setup)
    return plan, setup


def load_over_share(geometry: Geometry, batch: Batch) -> float:
    """The most loaded program's time over the mean, or over what it has to be at least."""
    plan, setup = planned(geometry, batch)
    config, cost = setup.config, setup.cost
    tile = config.tile_tokens
    loads, tiles_ns, starts_ns = np.zeros(PROGRAMS), 0.0, set()
    for program in range(PROGRAMS):
        for work in plan.works[slice(*plan.program_starts[[2 * program, 2 * program + 2]])]:
            _, _, row, rows, begin, end, _, mode = plan.items[
                work // geometry.num_kv_heads
            ].tolist()
            height = config.large_rows if rows > config.small_rows else config.small_rows
            states = 0
            if mode != MODE_DIRECT:
                step = [config.section_tokens, config.segment_tokens, tile][mode]
                states = -(-(end - begin) // step)
            read_ns = float(cost.token_ns(height)) * -(-(end - begin) // tile) * tile
            start_ns = float(cost.start_ns(height)) - height * cost.state_ns
            loads[program] += read_ns + start_ns
            loads[program] += min(height, rows - row) * states * cost.state_ns / 2
            tiles_ns += read_ns
            starts_ns.add(start_ns)
    np.testing.assert_allclose(loads, plan.loads)
    tile_ns = float(cost.token_ns(config.small_rows)) * tile
    _, reads = np.unique(plan.items[:, 1:4], axis=0, return_inverse=True)
    tiles = np.bincount(reads.ravel(), -(-(plan.items[:, 5] - plan.items[:, 4]) // tile))
    share_ns = tiles_ns / PROGRAMS
    return float(
        loads.max()
        / max(loads.mean(), least_load_ns(tiles, share_ns, tile_ns, starts_ns, geometry))
    )


def least_load_ns(
    tiles: np.ndarray,
    share_ns: float,
    tile_ns: float,
    starts_ns: set[float],
    geometry: Geometry,
) -> float:
    """Whole tiles, and each piece of work started: of the program that has most.

    Args:
        tiles: of what each run of rows reads; every one is work of its own, for every kv head.
        starts_ns: of tiles of few rows, and of many. If every program had one piece of equal size,
            that of the higher tile would take longest; what has two pieces may have the lower ones.
    """
    start_ns = min(starts_ns)
    heads = geometry.num_kv_heads
    whole_tiles_ns = np.ceil(share_ns / tile_ns) * tile_ns + start_ns
    started_ns = np.ceil(len(tiles) * heads / PROGRAMS) * (start_ns + tile_ns)
    # one piece for each program, of so many tiles that they suffice; or two for some
    size = 1
    while np.ceil(tiles / size).sum() * heads > PROGRAMS and size < tiles.max():
        size += 1
    pieces_ns = min(max(starts_ns) + size * tile_ns, 2 * (start_ns + tile_ns))
    return float(max(whole_tiles_ns, started_ns, pieces_ns))


def check(cases: Iterable[tuple[Geometry, Batch]]) -> None:
    ratios = {
        f"{geometry}, {batch.description}": load_over_share(geometry, batch)
        for geometry, batch in cases
    }
    worst = max(ratios, key=lambda each: ratios[each])
    assert ratios[worst] <= WORST, (worst, ratios[worst])
    assert statistics.geometric_mean(ratios.values()) <= MEAN


def test_one_shared_prefix() -> None:
    check(grid())


def test_random_forests() -> None:
    check(random_forests(500))

# SPDX-License-Identifier: Apache-2.0
"""Whether matrix instructions round alike in tiles of different heights."""

from dataclasses import replace

import numpy as np

from benchmarks.cuda import bits
from benchmarks.cuda.caches import poisoned_cache
from benchmarks.cuda.cases import (
    FP8,
    FP16,
    LLAMA,
    MAX_QUERY_LEN,
    TINY_CASES,
    batch_sizes,
    check_limits,
    random_forest,
)
from benchmarks.cuda.geometry import Geometry
from benchmarks.cuda.inputs import DeviceBatch, Inputs, Relay
from benchmarks.cuda.reference import rows_that_differ
from benchmarks.cuda.run import Run
from benchmarks.cuda.variants import Variant
from vllm_relay.attention_backends.cuda.config import KernelConfig

HEIGHTS: tuple[int, ...] = (64, 16, 32, 128)
WARPS: tuple[int, ...] = (8, 4)
"""The first of both are what the others are compared with."""


def variants(run: Run) -> list[Variant]:
    return [
        Variant(
            geometry, config, check_limits(run.size), has_lse=True, rivals=False,
            max_query_lens=(MAX_QUERY_LEN,),
        )
        for geometry in _geometries(run)
        for config in _configs(run).values()
    ]  # fmt: skip


def check(run: Run) -> None:
    """Whether tiles of different heights round alike: then they may be mixed in one launch."""
    rows = []
    for geometry in run.in_time(_geometries(run), "geometries of tile heights", 2.0):
        batch = random_forest(
            np.random.default_rng(7),
            block_size=geometry.block_size,
            max_requests=run.choose(64, 64, 4),
            shares=True,
            **batch_sizes(run.size, geometry),
        )
        cache = poisoned_cache(batch, geometry, run.device.device, seed=3)
        outputs = {}
        for name, config in _configs(run).items():
            run.result.doing(f"tiles of {name}, {geometry}")
            relay = Relay(
                run.device.device, geometry, config, check_limits(run.size),
                num_sms=run.device.num_sms,
            )  # fmt: skip
            uploaded = DeviceBatch.upload(batch, relay.limits, run.device.device, MAX_QUERY_LEN)
            inputs = Inputs.of(uploaded, geometry, cache)
            try:
                outputs[name], _ = bits.computed(relay, inputs, shares=False)
            except Exception as error:
                if not run.device.is_alive():
                    raise
                run.result.leave_out(f"tiles of {name}, {geometry}: {error}"[:300])
        base = next(iter(outputs), "")
        differing = {name: rows_that_differ(out, outputs[base]) for name, out in outputs.items()}
        row = {"geometry": str(geometry), "query tokens": batch.num_query_tokens}
        rows.append(row | {name: differing.get(name, "-") for name in _configs(run)})
        alike = [name for name, count in differing.items() if count == 0]
        others = [f"{name} ({count})" for name, count in differing.items() if count]
        run.result.add_finding(
            f"tiles, {geometry}: the same bits with {', '.join(alike)}"
            + (f"; other bits in so many query tokens with {', '.join(others)}" if others else "")
        )
    run.result.add_table(
        "Tile heights: query tokens whose bits differ from those of the first",
        rows,
        "All rows of a launch in tiles of one height, nothing shared. Heights that agree may be "
        "mixed; the candidates of `configs` are checked there as they are.",
    )


def _geometries(run: Run) -> list[Geometry]:
    full = [LLAMA, Geometry(32, 8, 64, 16, FP16, FP16), Geometry(32, 8, kv_dtype=FP8)]
    return run.choose(full, full[:1], [TINY_CASES[0].geometry])


def _configs(run: Run) -> dict[str, KernelConfig]:
    """By what is shown of them, the base first."""
    base = run.config(LLAMA)
    heights = run.choose(HEIGHTS, HEIGHTS, (16, 32))
    warps = run.choose(WARPS, WARPS, (base.num_warps,))
    return {
        f"{rows} rows, {number} warps": replace(
            base, small_rows=rows, large_rows=rows, num_warps=number
        )
        for number in warps
        for rows in heights
    }

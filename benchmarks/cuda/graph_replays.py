# SPDX-License-Identifier: Apache-2.0
"""One CUDA graph of attention that serves batches with other groups than it was captured with."""

import numpy as np

from benchmarks.cuda import bits
from benchmarks.cuda.caches import poisoned_cache
from benchmarks.cuda.cases import (
    LLAMA,
    MAX_QUERY_LEN,
    TINY_CASES,
    batch_sizes,
    check_limits,
    random_forest,
)
from benchmarks.cuda.geometry import PLAIN
from benchmarks.cuda.inputs import DeviceBatch, Inputs, Relay
from benchmarks.cuda.run import Run
from benchmarks.cuda.variants import Variant
from benchmarks.support.formatting import Row
from benchmarks.support.result import Goal

REPLAYED_STEPS = 8


def variants(run: Run) -> list[Variant]:
    query_lens = (1, MAX_QUERY_LEN)
    return [Variant(LLAMA, run.config(LLAMA), check_limits(run.size), max_query_lens=query_lens)]


def check(run: Run) -> None:
    """A captured attention, planned and replayed for batches with other groups."""
    geometry = run.choose(LLAMA, LLAMA, TINY_CASES[0].geometry)
    config, limits = run.config(geometry), check_limits(run.size)
    requests, count = run.choose((48, REPLAYED_STEPS), (48, 4), (8, 2))
    relay, eager = (
        Relay(run.device.device, geometry, config, limits, num_sms=run.device.num_sms)
        for _ in range(2)
    )
    rng = np.random.default_rng(99)
    rows: list[Row] = []
    for kind, max_query_len in (("decode", 1), ("speculation", MAX_QUERY_LEN)):
        run.result.doing(f"graph replays, up to {max_query_len} query tokens per request")
        batches = [
            random_forest(
                rng, block_size=geometry.block_size, max_requests=requests, shares=True,
                kind=kind, **batch_sizes(run.size, geometry),
            )
            for _ in range(count)
        ]  # fmt: skip
        most = max(batches, key=lambda batch: batch.num_blocks)
        # one cache for all: what one of them reads another may not
        cache = poisoned_cache(most, geometry, run.device.device, seed=5, poison=False)
        steps = [
            Inputs.of(
                DeviceBatch.upload(batch, limits, run.device.device, max_query_len),
                geometry, cache, seed=index,
            )
            for index, batch in enumerate(batches)
        ]  # fmt: skip
        differing = bits.of_planned_steps(
            relay, eager, steps, run.device.capture, requests=requests,
            tokens=requests * max_query_len, geometry=geometry, features=PLAIN,
        )  # fmt: skip
        rows += [
            {
                "batch": batch.description,
                "captured requests": requests,
                "captured query tokens": requests * max_query_len,
                "query tokens": batch.num_query_tokens,
                "differ from eager": count_differing,
            }
            for batch, count_differing in zip(batches, differing, strict=True)
        ]
    run.result.add_table(
        "One captured graph replayed for other batches",
        rows,
        "Attention is captured once over buffers that stay; planning runs before each replay. "
        "Compared bit for bit with a planner of its own on the batch without padding.",
    )
    total = sum(row["differ from eager"] for row in rows)
    run.result.add_goal(
        Goal(
            f"query tokens of {len(rows)} graph replays that differ from eager runs",
            float(total),
            0.0,
            lower_is_better=True,
            unit="tokens",
        )  # fmt: skip
    )

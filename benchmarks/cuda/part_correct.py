# SPDX-License-Identifier: Apache-2.0
"""Errors against float64 beside those of the rivals, independence of grouping bit for bit, and
CUDA graphs that are replayed with other batches."""

import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np

from benchmarks.attention.batches import Batch
from benchmarks.cuda import bits, graph_replays, tile_heights
from benchmarks.cuda.caches import poisoned_cache
from benchmarks.cuda.cases import (
    CASES,
    MAX_QUERY_LEN,
    TINY_CASES,
    Case,
    batch_sizes,
    check_limits,
    fixed_batch,
    random_forest,
)
from benchmarks.cuda.geometry import Geometry
from benchmarks.cuda.inputs import DeviceBatch, Inputs, Relay
from benchmarks.cuda.reference import Error, attention
from benchmarks.cuda.run import Run, geometric_mean
from benchmarks.cuda.variants import Variant
from benchmarks.support.formatting import Row
from benchmarks.support.result import Goal

BATCHES_WITH_RIVALS = 2
"""Of each case, also computed by the rivals."""


@dataclass
class Found:
    """What the batches of one case have shown."""

    errors: list[Error] = field(default_factory=list)
    lse_errors: list[float] = field(default_factory=list)
    over_rival: list[float] = field(default_factory=list)
    """Rms errors."""
    largest_over_rival: list[float] = field(default_factory=list)
    rival: str = ""
    query_tokens: int = 0
    differing: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def row(self, case: Case) -> Row:
        differing = {way: tokens for way, tokens in self.differing.items() if tokens}
        return {
            "case": str(case),
            "batches": len(self.errors),
            "rms error": max(error.rms for error in self.errors),
            "largest error": max(error.largest for error in self.errors),
            "lse error": max(self.lse_errors),
            "rival": self.rival or "none",
            "rms over rival's": geometric_mean(self.over_rival),
            "largest over rival's": geometric_mean(self.largest_over_rival),
            "query tokens": self.query_tokens,
            "bits": ", ".join(f"{way}: {tokens} differ" for way, tokens in differing.items())
            or "same",
        }


def variants(run: Run) -> list[Variant]:
    cases = run.choose(CASES, CASES, TINY_CASES)
    limits = check_limits(run.size)
    wanted = [
        Variant(case.geometry, run.config(case.geometry), limits, case.features, True,
                (1, MAX_QUERY_LEN), (True, False))
        for case in cases
    ]  # fmt: skip
    return [*wanted, *graph_replays.variants(run), *tile_heights.variants(run)]


def measure(run: Run) -> None:
    cases = run.choose(CASES, CASES, TINY_CASES)
    found: dict[Case, Found] = {}
    relays: dict[Case, Relay] = {}
    batches = {case: _batches(run, case.geometry, number) for number, case in enumerate(cases)}
    rounds = run.choose(4, 2, 1)
    try:
        _check_round(run, cases, batches, relays, found)
        graph_replays.check(run)
        tile_heights.check(run)
        for _ in range(rounds - 1):
            _check_round(run, cases, batches, relays, found)
    finally:
        _report(run, found)


def _check_round(
    run: Run,
    cases: list[Case],
    batches: dict[Case, Iterator[Batch]],
    relays: dict[Case, Relay],
    found: dict[Case, Found],
) -> None:
    """One more batch of every case."""
    for case in run.in_time(cases, "batches of cases", 1.0):
        if case not in relays:
            config = run.config(case.geometry)
            relays[case] = Relay(
                run.device.device, case.geometry, config, check_limits(run.size),
                num_sms=run.device.num_sms,
            )  # fmt: skip
        batch = next(batches[case])
        run.result.doing(f"{case}: {batch.description}")
        with run.tolerating(f"{case}, {batch.description}"):
            _check(run, case, relays[case], batch, found.setdefault(case, Found()))


def _check(run: Run, case: Case, relay: Relay, batch: Batch, found: Found) -> None:
    device = run.device.device
    seed = len(found.errors)
    numbers: dict[str, Any] = {"seed": seed, "key_factor": case.key_factor}
    cache = poisoned_cache(batch, case.geometry, device, **numbers)
    most = MAX_QUERY_LEN if int(np.diff(batch.query_start_loc).max()) > 1 else 1
    uploaded = DeviceBatch.upload(batch, relay.limits, device, most)
    inputs = Inputs.of(uploaded, case.geometry, cache, case.features, seed=seed + 1)
    expected, expected_lse = attention(inputs)
    out, lse = bits.computed(relay, inputs, everything=True)
    error = Error.of(out, expected)
    lse_error = float((lse.double() - expected_lse).abs().max())
    found.errors.append(error)
    found.lse_errors.append(lse_error)
    found.query_tokens += batch.num_query_tokens
    if not error.rms <= case.rms_tolerance or not lse_error <= case.lse_tolerance:
        run.result.add_finding(
            f"WRONG: {case}, {batch.description}: rms error {error.rms:.3g} (at most "
            f"{case.rms_tolerance:g} was expected), lse error {lse_error:.3g} (at most "
            f"{case.lse_tolerance:g})"
        )
    differing = bits.by_grouping(relay, inputs, out, np.random.default_rng(seed))
    for way, tokens in differing.items():
        found.differing[way] += tokens
    if seed < BATCHES_WITH_RIVALS:
        clean = poisoned_cache(batch, case.geometry, device, poison=False, **numbers)
        calls = run.rivals.prepare(replace(inputs, kv_cache=clean))
        rivals = {name: Error.of(call(), expected) for name, call in calls.items()}
        # a rival that computes something else is no measure
        rivals = {name: own for name, own in rivals.items() if 0 < own.rms <= case.rms_tolerance}
        if rivals:
            first = next(iter(rivals))
            best = min(rivals, key=lambda name: rivals[name].rms)
            found.rival = first if "FlashAttention" in first else best
            found.over_rival.append(error.rms / rivals[found.rival].rms)
            found.largest_over_rival.append(error.largest / rivals[found.rival].largest)


def _report(run: Run, found: dict[Case, Found]) -> None:
    result = run.result
    rows = [seen.row(case) for case, seen in found.items() if seen.errors]
    result.add_table(
        "Errors against float64, and bits",
        rows,
        "Workspace, output and every KV slot that no request may read are NaN before. Errors are "
        "the largest of all batches; those of the rival are on the same inputs. Bits: query tokens "
        "whose output changes when sharing everything becomes sharing what pays or nothing, when "
        "the batch comes in another order, or for a request alone.",
    )
    ratios = [ratio for seen in found.values() for ratio in seen.over_rival]
    names = sorted({seen.rival for seen in found.values() if seen.rival})
    result.add_goal(
        Goal(
            f"rms error over that of {' or '.join(names) or 'a rival'}, mean of {len(ratios)} "
            "batches",
            geometric_mean(ratios),
            1.0,
            lower_is_better=True,
        )  # fmt: skip
    )
    tokens = sum(seen.query_tokens for seen in found.values())
    differing = sum(sum(seen.differing.values()) for seen in found.values())
    result.add_goal(
        Goal(
            f"of {tokens} query tokens: outputs with bits that depend on grouping, order or "
            "company",
            float(differing),
            0.0,
            lower_is_better=True,
            unit="tokens",
        )  # fmt: skip
    )
    if ratios:
        result.add_finding(
            f"rms error over the rival's: median {statistics.median(ratios):.3f}, largest "
            f"{max(ratios):.3f}"
        )


def _batches(run: Run, geometry: Geometry, seed: int) -> Iterator[Batch]:
    """The fixed batch second, all others random: with one query token per request, or several."""
    rng = np.random.default_rng(1000 + seed)
    for index in count():
        if index == 1:
            yield fixed_batch(geometry.block_size)
            continue
        yield random_forest(
            rng,
            block_size=geometry.block_size,
            max_requests=run.choose(64, 64, 4),
            shares=True,
            kind=("decode", "speculation")[(index + seed) % 2],
            **batch_sizes(run.size, geometry),
        )

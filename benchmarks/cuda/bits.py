# SPDX-License-Identifier: Apache-2.0
"""Whether results depend, in any bit, on what else is in the batch or on how it is computed."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from benchmarks.attention.batches import Batch
from benchmarks.cuda.geometry import Features, Geometry
from benchmarks.cuda.inputs import DeviceBatch, Inputs, Relay
from benchmarks.cuda.reference import rows_that_differ

ALONE = 3
"""Requests that are also computed alone."""


def computed(
    relay: Relay, inputs: Inputs, *, shares: bool = True, everything: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp; workspace and both are NaN before."""
    out, lse = torch.full_like(inputs.query, torch.nan), relay.new_lse(inputs)
    relay.poison()
    relay.plan(inputs.batch, inputs.features, shares=shares, everything=everything)
    relay.attend(inputs, out, lse)
    return out, lse


def by_grouping(
    relay: Relay, inputs: Inputs, expected: torch.Tensor, rng: np.random.Generator
) -> dict[str, int]:
    """Query tokens whose output is not, in every bit, that of `expected`: where what pays is
    shared, where nothing is, where the batch comes in another order, and for requests alone."""
    batch = inputs.batch.host
    assert batch is not None
    differing = {
        "shared where it pays": rows_that_differ(computed(relay, inputs)[0], expected),
        "nothing shared": rows_that_differ(computed(relay, inputs, shares=False)[0], expected),
    }
    order = rng.permutation(batch.num_requests)
    permuted, tokens = subset(inputs, order, relay)
    out, _ = computed(relay, permuted, everything=True)
    differing["other order"] = rows_that_differ(out, expected[tokens])
    differing["alone"] = 0
    for request in order[:ALONE]:
        single, tokens = subset(inputs, np.array([request]), relay)
        out, _ = computed(relay, single)
        differing["alone"] += rows_that_differ(out, expected[tokens])
    return differing


def subset(inputs: Inputs, requests: np.ndarray, relay: Relay) -> tuple[Inputs, torch.Tensor]:
    """Some requests in some order, and which query tokens of `inputs` are theirs."""
    batch = inputs.batch.host
    assert batch is not None
    starts = batch.query_start_loc
    lengths = np.diff(starts)[requests]
    tokens = np.concatenate([np.arange(starts[r], starts[r + 1]) for r in requests])
    host = Batch(
        block_table=batch.block_table[requests],
        query_start_loc=np.append(0, np.cumsum(lengths)).astype(np.int32),
        seq_lens=batch.seq_lens[requests],
        block_size=batch.block_size,
        description=batch.description,
    )
    index = torch.from_numpy(tokens).to(inputs.query.device)
    device_batch = DeviceBatch.upload(
        host, relay.limits, inputs.query.device.type, inputs.batch.max_query_len
    )
    return replace(inputs, batch=device_batch, query=inputs.query[index]), index


def of_planned_steps(
    relay: Relay,
    eager: Relay,
    steps: list[Inputs],
    capture: Callable[[Callable[[], None]], Callable[[], None]],
    *,
    requests: int,
    tokens: int,
    geometry: Geometry,
    features: Features,
) -> list[int]:
    """Captures one attention over buffers that stay where they are, plans and replays it for every
    step, and returns the query tokens of each step that differ from `eager`'s.

    Args:
        steps: batches of at most so many requests and query tokens; all read one KV cache.
        requests: that are captured; those beyond a step's have no tokens and the null block.
        tokens: query tokens that are captured.
    """
    device = steps[0].query.device.type
    width = steps[0].batch.block_table.shape[1]
    batch = DeviceBatch(
        block_table=torch.zeros((requests, width), dtype=torch.int32, device=device),
        query_start_loc=torch.zeros(requests + 1, dtype=torch.int32, device=device),
        seq_lens=torch.zeros(requests, dtype=torch.int32, device=device),
        max_query_len=max(step.batch.max_query_len for step in steps),
        max_seq_len=relay.limits.max_seq_len,
    )
    query = torch.zeros(
        (tokens, geometry.num_heads, geometry.head_size), dtype=geometry.dtype, device=device
    )
    inputs = Inputs.of(batch, geometry, steps[0].kv_cache, features, query=query)
    out = torch.empty_like(query)

    def fill(step: Inputs) -> None:
        count, num_tokens = step.batch.num_requests, step.query.shape[0]
        batch.block_table.zero_()
        batch.block_table[:count] = step.batch.block_table
        batch.query_start_loc[: count + 1] = step.batch.query_start_loc
        batch.query_start_loc[count + 1 :] = num_tokens
        batch.seq_lens.zero_()
        batch.seq_lens[:count] = step.batch.seq_lens
        query[:num_tokens] = step.query
        query[num_tokens:] = torch.nan
        out.fill_(torch.nan)
        relay.poison()

    def attend() -> None:
        relay.attend(inputs, out)

    fill(steps[0])
    relay.plan(steps[0].batch, features, seq_lens=batch.seq_lens)
    attend()
    replay = capture(attend)
    differing = []
    for step in steps:
        fill(step)
        relay.plan(step.batch, features, seq_lens=batch.seq_lens)
        replay()
        expected = torch.full_like(step.query, torch.nan)
        eager.poison()
        eager.plan(step.batch, features)
        eager.attend(step, expected)
        differing.append(rows_that_differ(out[: step.query.shape[0]], expected))
    return differing

# SPDX-License-Identifier: Apache-2.0
"""Attention in float64, request by request: what every kernel is compared with."""

from dataclasses import dataclass

import torch

from benchmarks.cuda.inputs import Inputs


def attention(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [tokens, num_heads, head_size] and natural log-sum-exp [tokens, num_heads], float64.

    Scores go through scale, soft cap, ALiBi and softmax, in this order; query token i of the n of a
    request stands at position seq_len - n + i and sees no later ones.
    """
    geometry, features, batch = inputs.geometry, inputs.features, inputs.batch.host
    assert batch is not None
    group = geometry.num_heads // geometry.num_kv_heads
    device = inputs.query.device
    output = torch.empty(inputs.query.shape, dtype=torch.float64, device=device)
    lse = torch.empty(inputs.query.shape[:2], dtype=torch.float64, device=device)
    starts = batch.query_start_loc.tolist()
    for request, seq_len in enumerate(batch.seq_lens.tolist()):
        tokens = slice(starts[request], starts[request + 1])
        blocks = inputs.batch.block_table[request, : -(-seq_len // geometry.block_size)].long()
        kv = inputs.blocks(blocks).double().transpose(0, 1).flatten(1, 2)[:, :seq_len]
        key, value = kv.split(geometry.head_size, dim=-1)
        query = inputs.query[tokens].double().unflatten(1, (-1, group))  # [n, kv heads, group, D]
        scores = torch.einsum("nkgd,kcd->kgnc", query, key)
        scores *= geometry.scale * inputs.k_scale.double()
        if features.soft_cap:
            scores = features.soft_cap * torch.tanh(scores / features.soft_cap)
        position = torch.arange(seq_len, device=device)
        distance = position - position[seq_len - query.shape[0] :, None]  # [n, c]
        if inputs.alibi_slopes is not None:
            scores += inputs.alibi_slopes.double().view(-1, group, 1, 1) * distance
        hidden = distance > 0
        if features.sliding_window:
            hidden |= distance <= -features.sliding_window
        scores.masked_fill_(hidden, -torch.inf)
        own_lse = torch.logsumexp(scores, -1)
        if inputs.sinks is not None:
            own_lse = torch.logaddexp(own_lse, inputs.sinks.double().view(-1, group, 1))
        weights = torch.exp(scores - own_lse[..., None])
        own = torch.einsum("kgnc,kcd->nkgd", weights, value) * inputs.v_scale.double()
        output[tokens] = own.flatten(1, 2)
        lse[tokens] = own_lse.permute(2, 0, 1).flatten(1, 2)
    return output, lse


@dataclass(frozen=True)
class Error:
    """Of an output; NaN where there is a NaN."""

    rms: float
    """Of the differences, over that of the expected output."""
    largest: float
    """Difference, over the largest number expected."""

    @classmethod
    def of(cls, output: torch.Tensor, expected: torch.Tensor) -> "Error":
        difference = output.double() - expected
        return cls(
            float(difference.square().mean().sqrt() / expected.square().mean().sqrt()),
            float(difference.abs().max() / expected.abs().max()),
        )


def rows_that_differ(one: torch.Tensor, other: torch.Tensor) -> int:
    """Query tokens of two outputs in which some bit differs."""
    bits = {2: torch.int16, 4: torch.int32}[one.element_size()]
    return int((one.view(bits) != other.view(bits)).flatten(1).any(1).sum())

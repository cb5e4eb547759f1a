# SPDX-License-Identifier: Apache-2.0
"""Ways to choose which keys beyond the first and the last ones are read.

All read the sinks and the window. What is counted is what they read of the other tokens, "far" ones
here, relative to all of their keys and values in bfloat16: keys and values that any query head of
the kv head chose, once, and everything that was read to choose them. Where a selection is `shared`,
each query head attends to what any of its group chose, which costs no further bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from benchmarks.sparse.real_heads.aids import (
    INFLLM_BLOCK_TOKENS,
    INFLLM_REPRESENTATIVES,
    QUEST_PAGE_TOKENS,
    VALUE_BLOCK_TOKENS,
    Aids,
    in_blocks,
)

SINK_TOKENS = 64
WINDOW_TOKENS = 256
KEY_AND_VALUE_BYTES = 4  # of an element of both, in bfloat16
DEFAULT_ALPHA = 2e-4
LIGHT_WEIGHT = 0.01
LIGHT_OVER_LEAST = 50
LARGEST_UPPER_ERROR = 1.0


@dataclass(frozen=True)
class Asked:
    """What a selection is asked, of one layer.

    Attributes:
        queries: [kv heads, group, tokens, d]
        scores: [kv heads, group, tokens, n]; true ones, with the factor of the softmax.
        far: bool [tokens, n]; neither sink nor window, of the context's n tokens.
        near_max: [kv heads, group, tokens, 1]; the largest score of a sink or the window.
        shift: likewise; weights are exp(score - shift).
        scale: the factor of scores in the softmax.
    """

    queries: torch.Tensor
    scores: torch.Tensor
    far: torch.Tensor
    near_max: torch.Tensor
    shift: torch.Tensor
    scale: float
    aids: Aids

    @property
    def positions(self) -> torch.Tensor:
        """[tokens, 1]: where the far tokens of each query end."""
        return self.far.sum(-1, keepdim=True) + SINK_TOKENS


@dataclass(frozen=True)
class Chosen:
    """What a selection reads.

    Attributes:
        read: bool [kv heads, group, tokens, n]; a subset of the far ones.
        aid_bytes: what was read besides keys and values: bytes for each far token and element.
        weighted_values, weight: [kv heads, group, tokens, d] and [..., 1]; what stands for the far
            tokens that are not read; None: nothing does.
    """

    read: torch.Tensor
    aid_bytes: float = 0.0
    weighted_values: torch.Tensor | None = None
    weight: torch.Tensor | None = None


class Selection(Protocol):
    @property
    def name(self) -> str: ...

    def choose(self, asked: Asked) -> Chosen: ...


@dataclass(frozen=True)
class Dense:
    """Every key and value."""

    name = "dense"

    def choose(self, asked: Asked) -> Chosen:
        return Chosen(asked.far.expand_as(asked.scores))


@dataclass(frozen=True)
class Window:
    """StreamingLLM (2309.17453): sinks and a window, `share` of the far tokens longer."""

    share: float

    @property
    def name(self) -> str:
        return f"window, {self.share:.0%} longer" if self.share else "sinks and window only"

    def choose(self, asked: Asked) -> Chosen:
        ends = asked.positions
        begins = ends - (self.share * (ends - SINK_TOKENS)).round()
        read = asked.far & (torch.arange(asked.far.shape[1]) >= begins)
        return Chosen(read.expand_as(asked.scores))


@dataclass(frozen=True)
class TopK:
    """The k keys with the largest true scores: an oracle, which reads nothing to find them."""

    k: int

    @property
    def name(self) -> str:
        return f"best {self.k:,}, oracle"

    def choose(self, asked: Asked) -> Chosen:
        return Chosen(_best(asked.scores, asked.far.expand_as(asked.scores), self.k))


@dataclass(frozen=True)
class Range:
    """DIPR (2504.10326): keys whose weight is at least `alpha` times the largest, by a scan of
    eight-bit codes."""

    alpha: float

    @property
    def name(self) -> str:
        return f"alpha {self.alpha:g}"

    def choose(self, asked: Asked) -> Chosen:
        scores = asked.aids.codes.products(asked.queries, asked.aids.keys) * asked.scale
        scores = scores.masked_fill(~asked.far, -math.inf)
        return Chosen(scores >= _least(scores, asked, self.alpha), aid_bytes=1)


@dataclass(frozen=True)
class Remainder:
    """As relay_sparse does at its defaults (csrc/index/split_scan.h): a scan of the upper halves of
    the codes, of whose candidates lower halves are read.

    Keys of little weight count by their codes, with their own values; those out of range count
    together, by the weight that the scan found in a block of adjacent tokens, times the mean of the
    block's values.
    """

    alpha: float

    @property
    def name(self) -> str:
        return f"alpha {self.alpha:g} + remainder"

    def choose(self, asked: Asked) -> Chosen:
        codes, far = asked.aids.codes, asked.far
        whole = codes.products(asked.queries, asked.aids.keys) * asked.scale
        upper = codes.products(asked.queries, asked.aids.keys, upper=True) * asked.scale
        error = codes.upper_error(asked.queries) * asked.scale
        is_whole = error > LARGEST_UPPER_ERROR
        seen = torch.where(is_whole, whole, upper).masked_fill(~far, -math.inf)
        whole = whole.masked_fill(~far, -math.inf)

        reach = torch.where(is_whole, 0.0, error)
        candidates = seen >= _least(seen, asked, self.alpha) - reach
        known = whole.masked_fill(~candidates, -math.inf)
        read = candidates & (whole >= _least(known, asked, self.alpha))
        light = min(LIGHT_WEIGHT, LIGHT_OVER_LEAST * self.alpha)
        heavy = read & (whole >= _least(known, asked, light))

        weights = torch.exp(torch.where(candidates, whole, seen) - asked.shift)
        of_blocks = in_blocks(weights.masked_fill(read, 0), VALUE_BLOCK_TOKENS).sum(-1)
        values = torch.einsum("hgtb,hbd->hgtd", of_blocks, asked.aids.value_means)
        # light keys are taken at their true scores for those that are read
        wrong = weights - torch.exp(asked.scores - asked.shift)
        wrong = wrong.masked_fill(~(read & ~heavy), 0)
        values += torch.einsum("hgtn,hnd->hgtd", wrong, asked.aids.values)
        weight = of_blocks.sum(-1, keepdim=True) + wrong.sum(-1, keepdim=True)
        num_far = far.sum(-1).clamp(min=1)

        def share(chosen: torch.Tensor) -> float:
            """Of any query head of a group."""
            return (chosen.any(1).sum(-1) / num_far).mean().item()

        lower = share(candidates | is_whole & far)
        # light keys are not read, only their values
        unread_keys = share(read) - share(heavy)
        aid_bytes = 0.5 + 0.5 * lower + 2 / VALUE_BLOCK_TOKENS - 2 * unread_keys
        return Chosen(read, aid_bytes, values, weight)


@dataclass(frozen=True)
class Quest:
    """Quest (2406.10774): the pages with the largest upper bounds of a product in them."""

    share: float
    shared: bool = False

    @property
    def name(self) -> str:
        return f"Quest, {self.share:.0%} of the pages"

    def choose(self, asked: Asked) -> Chosen:
        low, high = asked.aids.page_bounds
        bounds = torch.einsum("hgtd,hpd->hgtp", asked.queries.clamp(min=0), high)
        bounds += torch.einsum("hgtd,hpd->hgtp", asked.queries.clamp(max=0), low)
        read = _best_blocks(bounds, asked.far, QUEST_PAGE_TOKENS, self.share)
        read = _of_group(read, self.shared)
        return Chosen(read, aid_bytes=2 * 2 / QUEST_PAGE_TOKENS)


@dataclass(frozen=True)
class InfLLM:
    """InfLLM (2402.04617): the blocks whose representative keys have the largest products."""

    share: float
    shared: bool = False

    @property
    def name(self) -> str:
        return f"InfLLM, {self.share:.0%} of the blocks"

    def choose(self, asked: Asked) -> Chosen:
        products = torch.einsum("hgtd,hbd->hgtb", asked.queries, asked.aids.representatives)
        read = _best_blocks(products, asked.far, INFLLM_BLOCK_TOKENS, self.share)
        read = _of_group(read, self.shared)
        return Chosen(read, aid_bytes=2 * INFLLM_REPRESENTATIVES / INFLLM_BLOCK_TOKENS)


@dataclass(frozen=True)
class Wave:
    """RetroInfer's wave index (2505.02922): the clusters with the largest products are read, and
    all others count as their centre, as often as they have keys, with the mean of their values.
    """

    share: float
    shared: bool = False

    @property
    def name(self) -> str:
        return f"wave index, {self.share:.0%} of the clusters"

    def choose(self, asked: Asked) -> Chosen:
        clusters = asked.aids.clusters
        labels = clusters.labels[:, None, None].expand_as(asked.scores)
        heads, group, tokens, _ = asked.scores.shape
        far = asked.far.float().expand_as(asked.scores)
        shape = heads, group, tokens, clusters.sizes.shape[1]
        sizes = torch.zeros(shape).scatter_add_(-1, labels, far)  # of far keys
        scores = torch.einsum("hgtd,hcd->hgtc", asked.queries, clusters.centres) * asked.scale
        count = round(self.share * shape[-1])
        best = _of_group(_best(scores, sizes > 0, count), self.shared)
        read = best.gather(-1, labels) & asked.far
        weights = torch.exp(scores - asked.shift) * sizes.masked_fill(best, 0)
        values = torch.einsum("hgtc,hcd->hgtd", weights, clusters.values)
        per_token = shape[-1] / labels.shape[-1]
        estimated = (~best & (sizes > 0)).any(1).float().mean().item()  # whose values are read
        aid_bytes = 2 * per_token * (1 + estimated)
        return Chosen(read, aid_bytes, values, weights.sum(-1, keepdim=True))


def _least(scores: torch.Tensor, asked: Asked, alpha: float) -> torch.Tensor:
    """The score that weighs `alpha` times as much as the best one, the near ones included."""
    largest = torch.maximum(scores.amax(-1, keepdim=True), asked.near_max)
    return largest + math.log(alpha) if alpha else torch.full_like(largest, -1e30)


def _of_group(chosen: torch.Tensor, shared: bool) -> torch.Tensor:
    """[kv heads, group, ...]: what any of the group chose, where it is shared."""
    return chosen.any(1, keepdim=True).expand_as(chosen) if shared else chosen


def _best(scores: torch.Tensor, allowed: torch.Tensor, count: int) -> torch.Tensor:
    """bool, as scores: the `count` best of the allowed ones in the last dimension."""
    chosen = torch.zeros_like(allowed)
    if count > 0:
        scores = scores.masked_fill(~allowed, -math.inf)
        chosen.scatter_(-1, scores.topk(min(count, scores.shape[-1]), -1).indices, True)
    return chosen & allowed


def _best_blocks(
    scores: torch.Tensor, far: torch.Tensor, tokens: int, share: float
) -> torch.Tensor:
    """bool [kv heads, group, tokens, n]: far keys of the best `share` of blocks with any."""
    any_far = in_blocks(far.float(), tokens).amax(-1) > 0
    count = round(share * any_far.sum(-1).max().item())
    best = _best(scores, any_far.expand_as(scores), count)
    return best.repeat_interleave(tokens, -1)[..., : far.shape[1]] & far

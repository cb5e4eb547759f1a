# SPDX-License-Identifier: Apache-2.0
"""What selections read to choose keys, made of a layer's keys and values once per context."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn.functional import pad

from vllm_relay.sparse.index import key_codes
from vllm_relay.sparse.index.elements import as_elements

QUEST_PAGE_TOKENS = 16
INFLLM_BLOCK_TOKENS = 128
INFLLM_REPRESENTATIVES = 4
INFLLM_LOCAL_TOKENS = 256
CLUSTER_TOKENS = 16
KMEANS_ROUNDS = 8
VALUE_BLOCK_TOKENS = 64


@dataclass(frozen=True)
class Codes:
    """Keys in eight bits, as the key indexes keep them: key = mean + step * code, about.

    Attributes:
        mean, step: float32 [kv heads, d]
        codes: int8 [kv heads, n, d]
        outside: of each kv head, the keys without a code, which are scored exactly.
    """

    mean: torch.Tensor
    step: torch.Tensor
    codes: torch.Tensor
    outside: list[torch.Tensor]

    @classmethod
    def of(cls, keys: torch.Tensor) -> Codes:
        """keys: float32 [kv heads, n, d]."""
        means, steps, codes, outside = [], [], [], []
        for head in keys:
            how, rows = key_codes.encode(as_elements("keys", head.contiguous().numpy()), 1)
            means.append(torch.from_numpy(how.mean))
            steps.append(torch.from_numpy(how.step))
            rows = torch.from_numpy(rows[:, : head.shape[1]]).to(torch.int16)
            codes.append((rows - 128).to(torch.int8))
            outside.append(torch.from_numpy(how.outside).long())
        return cls(torch.stack(means), torch.stack(steps), torch.stack(codes), outside)

    @cached_property
    def upper_halves(self) -> torch.Tensor:
        """Codes by their upper four bits: float32 [kv heads, n, d], in the middle of what these
        leave open."""
        return torch.div(self.codes.float(), 16, rounding_mode="floor") * 16 + 7.5

    def upper_error(self, queries: torch.Tensor) -> torch.Tensor:
        """Standard deviation of products with upper halves: [kv heads, group, tokens, 1]."""
        scaled = queries * self.step[:, None, None]
        return scaled.norm(dim=-1, keepdim=True) * 16 / math.sqrt(12)

    def products(
        self, queries: torch.Tensor, keys: torch.Tensor, *, upper: bool = False
    ) -> torch.Tensor:
        """Inner products [kv heads, group, tokens, n] by codes, or by their upper halves; the
        queries in eight bits too."""
        scaled = queries * self.step[:, None, None]
        unit = scaled.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
        rounded = (scaled / unit).round() * unit
        codes = self.upper_halves if upper else self.codes.float()
        found = torch.einsum("hgtd,hnd->hgtn", rounded, codes)
        found += torch.einsum("hgtd,hd->hgt", queries, self.mean)[..., None]
        for head, ids in enumerate(self.outside):
            found[head][..., ids] = queries[head] @ keys[head, ids].T
        return found


@dataclass(frozen=True)
class Clusters:
    """k-means of keys: labels [kv heads, n], centres [kv heads, c, d], sizes [kv heads, c] and the
    means of their values [kv heads, c, d].
    """

    labels: torch.Tensor
    centres: torch.Tensor
    sizes: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor, tokens: int = CLUSTER_TOKENS) -> Clusters:
        """Euclidean, from evenly spaced keys; keys and values: [kv heads, n, d]."""
        heads, n, d = keys.shape
        count = max(1, n // tokens)
        starts = torch.linspace(0, n - 1, count).long()
        labels = torch.empty(heads, n, dtype=torch.long)
        centres, sizes = keys[:, starts].clone(), torch.empty(heads, count)
        means = torch.zeros(heads, count, d)
        for head in range(heads):
            for _ in range(KMEANS_ROUNDS):
                near = keys[head] @ centres[head].T - centres[head].square().sum(1) / 2
                labels[head] = near.argmax(1)
                sizes[head] = torch.bincount(labels[head], minlength=count).float()
                sums = torch.zeros(count, d).index_add_(0, labels[head], keys[head])
                filled = sizes[head] > 0
                centres[head, filled] = sums[filled] / sizes[head, filled, None]
            means[head].index_add_(0, labels[head], values[head])
            means[head] /= sizes[head].clamp(min=1)[:, None]
        return cls(labels, centres, sizes, means)


class Aids:
    """Of one layer and one context, each made when it is first asked for.

    Args:
        keys, values: float32 [kv heads, n, d]
        importance: [kv heads, n]; the mean product of a key with the queries of the
            `INFLLM_LOCAL_TOKENS` tokens after it.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, importance: torch.Tensor) -> None:
        self.keys, self.values, self.importance = keys, values, importance

    @property
    def num_keys(self) -> int:
        return self.keys.shape[1]

    @cached_property
    def codes(self) -> Codes:
        return Codes.of(self.keys)

    @cached_property
    def value_means(self) -> torch.Tensor:
        """Of `VALUE_BLOCK_TOKENS` adjacent tokens: [kv heads, blocks, d]."""
        sums = in_blocks(self.values.mT, VALUE_BLOCK_TOKENS).sum(-1).mT
        counts = in_blocks(torch.ones(self.num_keys), VALUE_BLOCK_TOKENS).sum(-1)
        return sums / counts[:, None]

    @cached_property
    def page_bounds(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Least and greatest of `QUEST_PAGE_TOKENS` adjacent keys: [kv heads, pages, d] each."""
        low = in_blocks(self.keys.mT, QUEST_PAGE_TOKENS, fill=torch.inf).amin(-1).mT
        high = in_blocks(self.keys.mT, QUEST_PAGE_TOKENS, fill=-torch.inf).amax(-1).mT
        return low, high

    @cached_property
    def representatives(self) -> torch.Tensor:
        """The mean of those keys of `INFLLM_BLOCK_TOKENS` adjacent ones that the tokens after them
        score highest: [kv heads, blocks, d]. A query's product with it ranks blocks as its summed
        products with them do.
        """
        blocked = in_blocks(self.importance, INFLLM_BLOCK_TOKENS, fill=-torch.inf)
        ids = blocked.topk(INFLLM_REPRESENTATIVES, -1).indices
        ids = ids + torch.arange(blocked.shape[1])[:, None] * INFLLM_BLOCK_TOKENS
        ids = ids.clamp(max=self.num_keys - 1)  # of a last block with fewer keys than these
        heads = torch.arange(len(self.keys))[:, None, None]
        return self.keys[heads, ids].mean(2)

    @cached_property
    def clusters(self) -> Clusters:
        return Clusters.of(self.keys, self.values)


def importance(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[kv heads, n]: of each key, the mean product with the queries of the local tokens after it.

    Args:
        queries: [kv heads, group, n, d]
        keys: [kv heads, n, d]
    """
    n = keys.shape[1]
    sums = pad(queries.mean(1).double().cumsum(1), (0, 0, 1, 0))  # [kv heads, n + 1, d]
    begin = torch.arange(1, n + 1)
    end = (begin + INFLLM_LOCAL_TOKENS).clamp(max=n)
    counts = (end - begin).clamp(min=1)
    means = ((sums[:, end] - sums[:, begin]) / counts[:, None]).float()
    return (means * keys).sum(-1)


def in_blocks(x: torch.Tensor, tokens: int, fill: float = 0.0) -> torch.Tensor:
    """[..., n] as [..., blocks, tokens], the last one filled up."""
    return pad(x, (0, -x.shape[-1] % tokens), value=fill).unflatten(-1, (-1, tokens))

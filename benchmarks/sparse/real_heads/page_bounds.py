# SPDX-License-Identifier: Apache-2.0
"""How many pages of adjacent keys bounds can rule out, before any of their keys is read."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from benchmarks.sparse.real_heads.aids import in_blocks
from benchmarks.sparse.real_heads.selections import Asked, Chosen
from benchmarks.support.formatting import Row


class PageBounds:
    """Reads everything, and counts pages of which a query head of the group may want a key.

    A page's bound is the lesser of Quest's (the least and the greatest of each element, 2406.10774)
    and that of a ball around the keys' mean: no key of the page scores more.
    """

    name = "page bounds"

    def __init__(self, alphas: Sequence[float], page_tokens: Sequence[int]) -> None:
        self._counts = {
            (alpha, tokens): torch.zeros(3) for tokens in page_tokens for alpha in alphas
        }

    def choose(self, asked: Asked) -> Chosen:
        for (alpha, tokens), counts in self._counts.items():
            least = asked.shift + math.log(alpha)
            far = in_blocks(asked.far.float(), tokens).amax(-1) > 0
            heavy = in_blocks((asked.far & (asked.scores >= least)).float(), tokens).amax(-1) > 0
            wanted = far & (page_bounds(asked, tokens) >= least)
            counts += torch.tensor([
                float(len(asked.queries) * far.sum()), wanted.any(1).sum(), heavy.any(1).sum()
            ])  # fmt: skip
        return Chosen(asked.far.expand_as(asked.scores))

    def rows(self) -> list[Row]:
        return [
            {
                "tokens a page": tokens,
                "alpha": alpha,
                "not ruled out": float(wanted / pages),
                "with a key of that weight": float(heavy / pages),
            }
            for (alpha, tokens), (pages, wanted, heavy) in self._counts.items()
        ]


def page_bounds(asked: Asked, tokens: int) -> torch.Tensor:
    """[kv heads, group, tokens, pages]: what no key of a page scores more than."""
    keys = asked.aids.keys.mT  # [kv heads, d, n]
    queries = asked.queries
    low = in_blocks(keys, tokens, fill=torch.inf).amin(-1)
    high = in_blocks(keys, tokens, fill=-torch.inf).amax(-1)
    box = torch.einsum("hgtd,hdp->hgtp", queries.clamp(min=0), high)
    box += torch.einsum("hgtd,hdp->hgtp", queries.clamp(max=0), low)
    counts = in_blocks(torch.ones(keys.shape[-1]), tokens).sum(-1)
    centres = in_blocks(keys, tokens).sum(-1) / counts
    distances = (in_blocks(keys, tokens) - centres[..., None]).norm(dim=1)
    present = in_blocks(torch.ones(keys.shape[-1]), tokens) > 0
    radii = distances.masked_fill(~present, 0).amax(-1)  # [kv heads, pages]
    ball = torch.einsum("hgtd,hdp->hgtp", queries, centres)
    ball += queries.norm(dim=-1, keepdim=True) * radii[:, None, None]
    return torch.minimum(box, ball) * asked.scale

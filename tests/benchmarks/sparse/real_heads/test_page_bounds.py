# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import pytest
import torch

from benchmarks.sparse.real_heads.aids import Aids
from benchmarks.sparse.real_heads.page_bounds import PageBounds, page_bounds
from benchmarks.sparse.real_heads.selections import Asked


def asked(num_keys: int, seed: int) -> Asked:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    queries, keys = random(2, 3, 4, 8), random(2, num_keys, 8)
    scores = torch.einsum("hgtd,hnd->hgtn", queries, keys) * 0.5
    return Asked(
        queries=queries,
        scores=scores,
        far=torch.ones(4, num_keys, dtype=torch.bool),
        near_max=torch.full((2, 3, 4, 1), -torch.inf),
        shift=scores.amax(-1, keepdim=True),
        scale=0.5,
        aids=Aids(keys, random(2, num_keys, 8), random(2, num_keys)),
    )


@pytest.mark.parametrize("num_keys", [1, 5, 16, 37])
@pytest.mark.parametrize("tokens", [1, 4, 16])
def test_no_key_scores_more_than_its_page_may(num_keys: int, tokens: int) -> None:
    given = asked(num_keys, num_keys)
    bounds = page_bounds(given, tokens).repeat_interleave(tokens, -1)[..., :num_keys]
    assert (given.scores <= bounds + 1e-4).all()
    if tokens == 1:
        torch.testing.assert_close(given.scores, bounds)


def test_pages_are_counted_once_for_a_group() -> None:
    given = asked(64, 3)
    probe = PageBounds([0.7], [1, 8])
    assert probe.choose(given).read.all()
    heavy = (given.scores >= given.shift + math.log(0.7)).any(1)
    by_page = heavy.unflatten(-1, (8, 8)).any(-1)
    alone, paged = probe.rows()
    assert alone["with a key of that weight"] == pytest.approx(heavy.float().mean().item())
    assert alone["not ruled out"] == pytest.approx(heavy.float().mean().item())
    assert paged["with a key of that weight"] == pytest.approx(by_page.float().mean().item())
    assert paged["not ruled out"] > paged["with a key of that weight"]

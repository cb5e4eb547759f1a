# SPDX-License-Identifier: Apache-2.0
"""What results have to be: within bounds of float64, or the same to the bit."""

from __future__ import annotations

import torch

from tests.attention_backends.strategies import AttentionProblem

Result = tuple[torch.Tensor, torch.Tensor]
"""Output and lse."""


def assert_exact_enough(
    problem: AttentionProblem, result: Result, bounds: Result, description: str = ""
) -> None:
    """Bounds are those of `strategies.error_bounds`; the problem's description is told, unless
    another one is given."""
    description = description or problem.description
    output, lse = result
    output_bound, lse_bound = bounds
    expected, expected_lse = problem.expected
    assert output.dtype == problem.query.dtype and lse.dtype == torch.float32
    assert output.shape == expected.shape and lse.shape == expected_lse.shape
    assert not output.isnan().any(), f"NaN in output: {description}"
    output_excess = ((output.double() - expected).abs() / output_bound).max() if len(output) else 0
    assert output_excess <= 1, f"error {output_excess:.2f} of its bound: {description}"
    empty = expected_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, empty), description
    lse_excess = ((lse.double() - expected_lse).abs() / lse_bound)[~empty]
    assert (lse_excess <= 1).all(), f"lse {lse_excess.max():.2f} of its bound: {description}"


def assert_same_bits(result: Result, expected: Result, description: str = "") -> None:
    for name, got, wanted in zip(("output", "lse"), result, expected, strict=True):
        assert got.dtype == wanted.dtype
        # compared as numbers: only NaN and the sign of zero could tell bits apart
        assert torch.equal(got, wanted), (
            f"{name} differs in {(got != wanted).sum()} of {got.numel()} elements: {description}"
        )

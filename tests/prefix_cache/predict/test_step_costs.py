# SPDX-License-Identifier: Apache-2.0
"""What a step takes: from options, a file or samples."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_relay.prefix_cache.predict.step_costs import (
    DEFAULT_COSTS,
    StepCosts,
    StepSample,
    fit_costs,
    read_costs,
    step_costs,
    write_costs,
)

# steps, tokens and waits, of which no two are nearly alike
WORK = [(1, 16, 1), (1, 2000, 1), (64, 79, 1), (64, 1264, 1)]


def given_costs(
    step_ms: float | None = None, token_us: float | None = None, path: Path | None = None
) -> StepCosts | None:
    return step_costs(step_ms, token_us, path, has_clock=True)


def test_options_go_before_a_file_and_this_before_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    write_costs(path, StepCosts(2e-3, 3e-6))
    assert given_costs() == DEFAULT_COSTS
    assert given_costs(path=path) == StepCosts(2e-3, 3e-6)
    assert given_costs(5, path=path) == StepCosts(5e-3, 3e-6)
    assert given_costs(5, 10, path) == StepCosts(5e-3, 10e-6)
    assert StepCosts(5e-3, 10e-6).seconds(100) == pytest.approx(6e-3)
    assert step_costs(None, None, None, has_clock=False) is None
    with pytest.raises(ValueError, match=f"--costs {path}: has no effect with --arrivals offline"):
        step_costs(None, None, path, has_clock=False)


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", '{"step_s": 1}', '{"step_s": 1, "token_s": "a"}'),
        *('{"step_s": 1, "token_s": -1}', '{"step_s": NaN, "token_s": 1}'),
        *('{"step_s": 0, "token_s": 0}', '{"step_s": 1, "token_s": 1, "more": 1}'),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "costs.json"
    with pytest.raises(ValueError, match=f"--costs {path}: cannot be read"):
        read_costs(path)
    path.write_text(text)
    with pytest.raises(ValueError, match=f"--costs {path}: (cannot be read|expected an object)"):
        read_costs(path)


@given(
    step_s=st.floats(1e-4, 1),
    token_s=st.floats(1e-6, 1e-3),
    wait_s=st.floats(0, 0.1),
)
def test_costs_are_found_again(step_s: float, token_s: float, wait_s: float) -> None:
    samples = [
        StepSample(steps, tokens, step_s * steps + token_s * tokens + wait_s * waits, waits)
        for steps, tokens, waits in WORK
    ]
    found = fit_costs(samples)
    assert found.step_s == pytest.approx(step_s, rel=1e-4)
    assert found.token_s == pytest.approx(token_s, rel=1e-4)
    alone = [StepSample(*each[:2], step_s * each[0] + token_s * each[1]) for each in WORK[1:3]]
    found = fit_costs(alone)
    assert (found.step_s, found.token_s) == (
        pytest.approx(step_s, rel=1e-6),
        pytest.approx(token_s, rel=1e-6),
    )


@given(st.lists(st.floats(1e-3, 10), min_size=4, max_size=4))
def test_no_cost_is_below_0_and_none_beside_is_better(seconds: list[float]) -> None:
    samples = [StepSample(*work[:2], each) for work, each in zip(WORK, seconds, strict=True)]

    def off(costs: StepCosts) -> float:
        return sum(
            ((costs.step_s * each.steps + costs.token_s * each.tokens) / each.seconds - 1) ** 2
            for each in samples
        )

    found = fit_costs(samples)
    assert found.step_s >= 0 and found.token_s >= 0
    for step in (-1e-3, 0, 1e-3):
        for token in (-1e-3, 0, 1e-3):
            other = StepCosts(
                max(0.0, found.step_s + step * max(seconds)),
                max(0.0, found.token_s + token * max(seconds) / 2000),
            )
            assert off(found) <= off(other) * (1 + 1e-9) + 1e-12


def test_samples_that_are_alike_tell_nothing() -> None:
    for samples in (
        [],
        [StepSample(1, 10, 1.0)],
        [StepSample(1, 10, 1.0), StepSample(2, 20, 2.0)],
        [StepSample(1, 0, 1.0), StepSample(2, 0, 2.0)],
        [StepSample(1, 10, 1.0, 1), StepSample(2, 10, 1.0, 1)],
    ):
        with pytest.raises(ValueError, match=f"{len(samples)} samples given that do not tell"):
            fit_costs(samples)

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.attention_backends.flash_twin import flash_attn_varlen_func
from vllm_relay.attention_backends.cuda import tune as gpu_tune
from vllm_relay.attention_backends.cuda.config import KernelConfig
from vllm_relay.attention_backends.cuda.flash import tune as flash_tune
from vllm_relay.attention_backends.cuda.tune import Load, Result, Sample, Shape

TINY = KernelConfig(
    tile_tokens=16, segment_tokens=32, section_tokens=64, small_rows=16, large_rows=16
)


def samples(state_cost: float, start_tokens: float) -> list[Sample]:
    """Batches of a device of 4 TB/s whose launches take 6 us."""
    batches = [(1e7, 0, 1e5), (1e7, 4e6, 1e5), (5e7, 4e6, 4e6), (3e6, 1e6, 2e6), (8e7, 2e7, 1e6)]
    return [
        Sample(
            6 + (kv_bytes + state_cost * state_bytes + start_tokens * start_bytes) / 4e6,
            kv_bytes,
            state_bytes,
            start_bytes,
        )
        for kv_bytes, state_bytes, start_bytes in batches
    ]


@pytest.mark.parametrize(("state_cost", "start_tokens"), [(1.0, 32.0), (3.0, 4.0), (0.5, 200.0)])
def test_costs_are_found_in_times(state_cost: float, start_tokens: float) -> None:
    found = gpu_tune.calibrate(samples(state_cost, start_tokens))
    assert found == pytest.approx((state_cost, start_tokens), rel=1e-6)


def test_costs_stay_in_bounds() -> None:
    assert gpu_tune.calibrate(samples(100.0, 1e4)) == (
        gpu_tune.MAX_STATE_COST,
        gpu_tune.MAX_START_TOKENS,
    )
    assert gpu_tune.calibrate(samples(0.0, 0.0))[0] == gpu_tune.MIN_STATE_COST


def test_times_that_say_nothing_are_refused() -> None:
    constant = [sample._replace(time_us=10.0) for sample in samples(1.0, 1.0)]
    with pytest.raises(ValueError, match="do not grow with their bytes"):
        gpu_tune.calibrate(constant)


def test_the_fastest_that_is_invariant_wins() -> None:
    slow, fast, wrong = (replace(TINY, num_stages=n) for n in (1, 2, 3))
    results = [
        Result(slow, (10.0, 10.0), True),
        Result(fast, (2.0, 32.0), True),
        Result(wrong, (1.0, 1.0), False),
        Result(TINY, (), False, "OutOfResources: shared memory"),
    ]
    assert gpu_tune.best_of(results).config == fast
    with pytest.raises(RuntimeError, match="OutOfResources: shared memory; grouping changes bits"):
        gpu_tune.best_of(results[2:])


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (12, 0)])
def test_candidates_are_different_and_begin_with_what_ships(capability: tuple[int, int]) -> None:
    configs = gpu_tune.candidates(capability, 128, 2)
    assert len(set(configs)) == len(configs) > 5
    wide = gpu_tune.candidates(capability, 256, 2)
    assert all(config.for_head_size(256) == config for config in wide)
    in_fp8 = gpu_tune.candidates(capability, 128, 1)
    assert all(config.small_rows == config.large_rows for config in in_fp8)


@pytest.fixture(scope="module")
def bench() -> gpu_tune.Bench:
    shape = Shape(4, 2, 32, torch.float32, torch.float32, 16)
    return gpu_tune.Bench(shape, "cpu", (Load(4, 1, 64, 20), Load(4, 2, 40, 30)))


def test_a_configuration_that_is_invariant(bench: gpu_tune.Bench) -> None:
    assert bench.is_invariant(bench.planner(TINY))


def test_a_configuration_that_is_not(
    bench: gpu_tune.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = gpu_tune.Bench.attend

    def attend_a_bit_off(self: gpu_tune.Bench, *args, sharing: str | None):
        run = attend(self, *args, sharing=sharing)
        return lambda: (run(), self.out.view(-1)[:1].mul_(1 + 2**-23 * (sharing == "all")))

    monkeypatch.setattr(gpu_tune.Bench, "attend", attend_a_bit_off)
    assert not bench.is_invariant(bench.planner(TINY))


def test_batches_are_counted(bench: gpu_tune.Bench) -> None:
    planner = bench.planner(TINY)
    token_bytes = 2 * 32 * 4
    bench.attend(planner, bench.loads[0], sharing="all")()
    shared = bench.sample(planner, bench.loads[0], 3.0)
    assert shared.kv_bytes == (64 + 4 * 20) * 2 * token_bytes
    bench.attend(planner, bench.loads[0], sharing=None)()
    alone = bench.sample(planner, bench.loads[0], 3.0)
    assert alone.kv_bytes == 4 * (64 + 20) * 2 * token_bytes
    assert shared.start_bytes > 0 and shared.state_bytes > 0


def test_every_candidate_is_measured(
    bench: gpu_tune.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def time_us(run) -> float:
        run()
        return 5.0

    monkeypatch.setattr(bench, "time_us", time_us)
    too_large = replace(TINY, num_stages=99)
    planner = bench.planner
    monkeypatch.setattr(
        bench, "planner", lambda config: 1 / 0 if config == too_large else planner(config)
    )
    found = list(gpu_tune.measure(bench, [TINY, too_large]))
    assert found[0] == Result(TINY, (5.0, 5.0), True)
    assert found[1].times_us == () and "ZeroDivisionError" in found[1].reason
    sample = bench.sample
    monkeypatch.setattr(
        bench,
        "sample",
        lambda planner, load, _: (
            found := sample(planner, load, 1.0),
            found._replace(time_us=found.kv_bytes + found.state_bytes),
        )[1],
    )
    config = gpu_tune.with_costs(bench, TINY)
    assert config.state_cost == pytest.approx(1.0, abs=0.01)
    assert replace(config, state_cost=TINY.state_cost, start_tokens=32.0) == TINY


def test_both_ways_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is as fast as a clock says, and both compute what FlashAttention alone does."""
    shape = Shape(4, 2, 32, torch.float32, torch.float32, 16)
    bench = gpu_tune.Bench(shape, "cpu", (Load(4, 1, 640, 20), Load(3, 3, 40, 30)))
    calls, timed = [0], []

    def flash_attention(*args, **keywords):
        calls[0] += 1
        return flash_attn_varlen_func(*args, **keywords)

    def time_us(run) -> float:
        calls[0] = 0
        run()
        timed.append(calls[0])
        return 30.0 if calls[0] == 0 else 20.0 * calls[0]

    monkeypatch.setattr(bench, "time_us", time_us)
    compared = flash_tune.compare(bench, bench.planner(TINY), flash_attention, fa_version=2)
    assert timed == [2, 0, 1, 1, 0, 1]  # the second batch shares nothing
    shared, alone = (flash_tune.Compared(load, 20.0, 30.0, 20.0) for load in bench.loads)
    assert compared == [replace(shared, flash_us=40.0), alone]
    assert flash_tune.faster_of(compared) == "flash"  # 28.3 and 30
    assert flash_tune.faster_of(compared[:1]) == "triton"


@pytest.mark.parametrize("wrong", ["flash", "triton"])
def test_results_that_differ_are_refused(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    shape = Shape(4, 2, 32, torch.float32, torch.float32, 16)
    bench = gpu_tune.Bench(shape, "cpu", (Load(4, 1, 640, 20),))
    planner = bench.planner(TINY)
    if wrong == "flash":
        monkeypatch.setattr(
            flash_tune.NodeBuffers, "attend", lambda *args, **keywords: args[5].fill_(torch.nan)
        )
    else:
        monkeypatch.setattr(
            gpu_tune, "relay_attention", lambda *args, **keywords: args[4].fill_(torch.nan)
        )
    with pytest.raises(ValueError, match=f"{wrong} differs from FlashAttention by .* expected at"):
        flash_tune.compare(bench, planner, flash_attn_varlen_func)

# SPDX-License-Identifier: Apache-2.0
"""The blocks of a worker's requests, against lists of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

from vllm_relay.attention_backends.worker_blocks import WorkerBlocks
from vllm_relay.vllm_changes.worker.steps import call_around_attention

NUM_GROUPS = 2
GROUPS = [
    SimpleNamespace(layer_names=["a", "b"], kv_cache_spec=SimpleNamespace(block_size=16)),
    SimpleNamespace(layer_names=["c"], kv_cache_spec=SimpleNamespace(block_size=32)),
]


def worker(**runner: Any) -> Any:
    config = SimpleNamespace(kv_cache_groups=GROUPS)
    return SimpleNamespace(model_runner=SimpleNamespace(kv_cache_config=config, **runner))


def output(
    ended: set[str],
    new: dict[str, list[list[int]]],
    grown: dict[str, list[list[int]] | None],
    resumed: set[str],
) -> Any:
    return SimpleNamespace(
        finished_req_ids=ended,
        scheduled_new_reqs=[SimpleNamespace(req_id=id, block_ids=ids) for id, ids in new.items()],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(grown), new_block_ids=list(grown.values()), resumed_req_ids=resumed
        ),
    )


@given(seed=st.integers(0, 2**32 - 1))
def test_blocks_are_those_that_the_scheduler_gave(seed: int) -> None:
    rng = np.random.default_rng(seed)
    blocks = WorkerBlocks()
    held: dict[str, list[list[int]]] = {}

    def some_ids() -> list[list[int]]:
        longest = int(rng.choice([3, 3, 600]))
        return [rng.integers(1, 1000, rng.integers(longest)).tolist() for _ in range(NUM_GROUPS)]

    num_begun = 0
    for _ in range(int(rng.integers(1, 8))):
        ended = {each for each in held if rng.random() < 0.2}
        num_new = int(rng.choice([0, 1, 3, 70]))
        new = {f"r{num_begun + number}": some_ids() for number in range(num_new)}
        num_begun += num_new
        running = [each for each in held if each not in ended and rng.random() < 0.8]
        resumed = {each for each in running if rng.random() < 0.1}
        grown = {
            each: some_ids() if each in resumed or rng.random() < 0.5 else None for each in running
        }
        changes = blocks.num_changes
        blocks.begin_step(worker(), output(ended, new, grown, resumed))
        assert (blocks.num_changes > changes) == bool(ended or new or resumed)
        held = {each: ids for each, ids in held.items() if each not in ended} | new
        for each, ids in grown.items():
            if ids is not None:
                old = [[]] * NUM_GROUPS if each in resumed else held[each]
                held[each] = [before + more for before, more in zip(old, ids, strict=True)]
        order = list(rng.permutation([*held, "unknown"]))
        for group in range(NUM_GROUPS):
            rows = blocks.rows(order)
            table, num_blocks = (
                blocks.order(group).table(rows),
                blocks.order(group).num_blocks(rows),
            )
            assert table.dtype == np.int32
            for name, row, count in zip(order, table, num_blocks, strict=True):
                assert row[:count].tolist() == held.get(name, [[]] * NUM_GROUPS)[group]


def test_groups_and_requests_of_a_step() -> None:
    blocks = WorkerBlocks()
    assert blocks.request_ids(3) == []
    blocks.begin_step(
        worker(input_batch=SimpleNamespace(req_ids=["x", "y"])),
        output(set(), {"x": [], "y": [], "z": []}, {}, set()),
    )
    assert blocks.request_ids(1) == ["x"] and blocks.request_ids(3) == ["x", "y"]
    blocks.begin_batch(SimpleNamespace(req_ids=["z"]))
    assert blocks.request_ids(3) == ["z"]
    blocks.begin_batch(SimpleNamespace(req_ids=["z", "made up"]))
    assert blocks.request_ids(1) == ["z"] and blocks.request_ids(2) == []
    assert [blocks.group_of(name) for name in "abc"] == [0, 0, 1]
    assert blocks.block_size(1) == 32
    assert blocks.order(0).table(blocks.rows(["z"])).shape == (1, 0)
    blocks.begin_step(worker(), output(set(), {"x": [[1, 2], []]}, {}, set()))
    assert blocks.order(0).table(blocks.rows(["z", "x"])).tolist() == [[0, 0], [1, 2]]
    with pytest.raises(ValueError, match="layer d is in none of the 2 KV cache groups"):
        blocks.group_of("d")


def test_batches_of_hybrid_models_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before their attention, and when that is known; also if it fails."""
    seen: list[Any] = []
    state_classes: list[Any] = [DefaultModelState, MambaHybridModelState]
    for state_cls in state_classes:
        monkeypatch.setattr(
            state_cls, "prepare_attn", lambda self, batch: {"batch": 1 // batch, "seen": [*seen]}
        )
    call_around_attention("test", seen.append, lambda: seen.append("end"))
    for state_cls in state_classes:
        assert state_cls.prepare_attn(None, 1) == {"batch": 1, "seen": [1]}
        with pytest.raises(ZeroDivisionError):
            state_cls.prepare_attn(None, 0)
        assert seen == [1, "end", 0, "end"]
        seen.clear()

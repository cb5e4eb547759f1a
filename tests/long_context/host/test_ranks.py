# SPDX-License-Identifier: Apache-2.0
"""Ranks in processes of their own, which lose different contexts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.vllm_processes import context
from tests.support.waiting import WAIT_S
from vllm_relay.long_context.host.worker import lost_in_any_rank

STEPS: list[list[dict[str, str]]] = [
    [{}, {}],
    [{}, {"r1": "a"}],
    [{"r1": "a"}, {}],
    [{"r1": "a", "r2": "b"}, {"r3": "c", "r1": "a"}],
    [{}, {}],
]
"""What each of two ranks has lost."""


def run_rank(rank: int, store: str, answers: Any) -> None:
    import torch.distributed
    import vllm.distributed

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    group = SimpleNamespace(world_size=2, cpu_group=torch.distributed.group.WORLD)
    vllm.distributed.get_tp_group = lambda: group
    answers.put((rank, [lost_in_any_rank(step[rank]) for step in STEPS]))
    torch.distributed.destroy_process_group()


def test_all_ranks_know_what_any_has_lost(tmp_path: Path) -> None:
    answers = context.Queue()
    ranks = [
        context.Process(target=run_rank, args=(rank, str(tmp_path / "store"), answers))
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    found = dict(answers.get(timeout=WAIT_S) for _ in ranks)
    for rank in ranks:
        rank.join(WAIT_S)
        assert rank.exitcode == 0
    wanted = [first | second for first, second in STEPS]
    assert found == {0: wanted, 1: wanted}


def test_one_rank_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.distributed.get_tp_group", lambda: SimpleNamespace(world_size=1))
    assert lost_in_any_rank({"r1": "a"}) == {"r1": "a"}

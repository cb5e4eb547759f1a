# SPDX-License-Identifier: Apache-2.0
"""How engine cores are started."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from vllm.v1.engine.utils import CoreEngineProcManager

from vllm_relay.vllm_changes.engine_start import block_interrupts_of_engine_cores


@pytest.mark.parametrize("fails", [False, True])
def test_only_what_is_started_hears_no_interrupt(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes inherit the mask of the thread that starts them."""
    masks: list[set[Any]] = []

    def start(manager: Any) -> None:
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        if fails:
            raise RuntimeError("no process")

    monkeypatch.setattr(CoreEngineProcManager, "__init__", start)
    block_interrupts_of_engine_cores()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    manager = object.__new__(CoreEngineProcManager)
    if fails:
        with pytest.raises(RuntimeError, match="no process"):
            CoreEngineProcManager.__init__(manager)
    else:
        CoreEngineProcManager.__init__(manager)
    assert masks == [before | {signal.SIGINT}]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    assert signal.SIGINT not in before

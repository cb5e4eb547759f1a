# SPDX-License-Identifier: Apache-2.0
"""How engine cores are started."""

from __future__ import annotations

import signal
from multiprocessing import resource_tracker
from typing import Any

import pytest
import zmq
from vllm.utils.network_utils import zmq_socket_ctx
from vllm.v1.engine.utils import CoreEngineProcManager

from vllm_relay.vllm_changes.engine_start import interruptible_start


def blocked() -> set[Any]:
    return set(signal.pthread_sigmask(signal.SIG_BLOCK, ()))


@pytest.mark.parametrize("fails", [False, True])
def test_only_processes_that_start_hear_no_interrupt(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They inherit the mask of the thread that starts them."""
    masks: list[set[Any]] = []

    def start(manager: Any) -> None:
        masks.append(blocked())
        if fails:
            raise RuntimeError("no process")

    # the tracker of multiprocessing unblocks interrupts, once
    monkeypatch.setattr(resource_tracker, "ensure_running", lambda: masks.append(blocked()))
    monkeypatch.setattr(CoreEngineProcManager, "__init__", start)
    before = blocked()
    with interruptible_start():
        manager = object.__new__(CoreEngineProcManager)
        if fails:
            with pytest.raises(RuntimeError, match="no process"):
                CoreEngineProcManager.__init__(manager)
        else:
            CoreEngineProcManager.__init__(manager)
    assert signal.SIGINT not in before
    assert masks == [before, before | {signal.SIGINT}]
    assert blocked() == before


def test_an_interrupt_ends_what_vllm_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a socket of vLLM, a KeyboardInterrupt is dropped."""
    monkeypatch.setattr(CoreEngineProcManager, "__init__", CoreEngineProcManager.__init__)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interruptible_start():
        with zmq_socket_ctx("inproc://waiting", zmq.PAIR, bind=True):
            signal.raise_signal(signal.SIGINT)
        pytest.fail("it waits on")
    assert signal.getsignal(signal.SIGINT) is handler


def test_an_interrupt_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interruptible_start():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)

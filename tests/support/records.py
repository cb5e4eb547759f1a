# SPDX-License-Identifier: Apache-2.0
"""How much is kept about requests: nothing when all are done."""

from __future__ import annotations

from vllm_relay.modules.engine.admission import ModuleAdmission
from vllm_relay.modules.engine.waiting import WaitingRequests
from vllm_relay.scheduler.vllm_queue import PrefixRequestQueue


def records_of_queue(queue: PrefixRequestQueue) -> int:
    kept = (queue._positions, queue._set_aside, queue._blocked, queue._lacking, queue._classes)
    return sum(map(len, kept)) + (queue._popped is not None)


def records_of_waiting(waiting: WaitingRequests) -> int:
    kept = (waiting._waiters, waiting._lists, waiting._looked_at, waiting._wanted)
    return sum(map(len, kept))


def records_of_modules(modules: ModuleAdmission) -> int:
    kept = (modules._encodings, modules._keys, modules._first)
    holds = modules._lease.request is not None
    return sum(map(len, kept)) + holds + records_of_waiting(modules._waiting)

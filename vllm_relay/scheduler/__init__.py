# SPDX-License-Identifier: Apache-2.0
"""A scheduler for vLLM that orders requests by their prefixes.

order.py             prefix by prefix: a trie of waiting requests                  (pure)
warm_up.py           one computes or loads a prefix, the others are held           (pure)
fairness.py          how far one may be overtaken, who is late, how many were      (pure)
lanes.py             the waiting requests of one priority and tenant, and a limit  (pure)
tenants.py           those of one priority; equal shares of tokens for tenants     (pure)
vllm_queue.py        takes the place of vLLM's queue of waiting requests           (vLLM)
vllm_scheduler.py    vLLM's schedulers with these: hooks, nothing else             (vLLM)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler


def RelayScheduler(*args: Any, **kwargs: Any) -> Scheduler:  # noqa: N802
    """What ``--scheduler-cls vllm_relay.scheduler.RelayScheduler`` names.

    Takes the arguments of vLLM's Scheduler and returns a scheduler of the kind, synchronous or
    asynchronous, that the configuration asks for.
    """
    from vllm_relay.scheduler.vllm_scheduler import AsyncRelayScheduler, SyncRelayScheduler

    asynchronous = kwargs["vllm_config"].scheduler_config.async_scheduling
    return (AsyncRelayScheduler if asynchronous else SyncRelayScheduler)(*args, **kwargs)

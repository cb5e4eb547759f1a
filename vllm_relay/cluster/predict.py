# SPDX-License-Identifier: Apache-2.0
"""`vllm-relay predict --replicas`: what several replicas do with the requests of a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vllm_relay.cluster.rules import ONLINE, offline
from vllm_relay.cluster.simulate import Outcome, simulated_replicas
from vllm_relay.prefix_cache.predict.engine import CacheSize, PredictorSettings
from vllm_relay.prefix_cache.predict.input import PredictedRequest
from vllm_relay.prefix_cache.predict.load import Load
from vllm_relay.prefix_cache.predict.run import ReplicaRows
from vllm_relay.progress import Show

_WINDOW_PER_RUNNING = 2


def replica_rows(num_replicas: int, router: str | None) -> ReplicaRows:
    """
    Args:
        router: of `ONLINE`; None for all of them.

    Returns:
        What predicts a row for each cache size and rule.

    Raises:
        ValueError: there is no such router, or no replica.
    """
    if num_replicas < 1:
        raise ValueError(f"--replicas {num_replicas}: expected at least 1")
    if router is not None and router not in ONLINE:
        raise ValueError(f"--router {router}: expected one of {', '.join(ONLINE)}")
    rules = list(ONLINE) if router is None else [router]

    def predict(
        settings: PredictorSettings,
        requests: Sequence[PredictedRequest],
        sizes: Sequence[CacheSize],
        load: Load,
        show: Show,
    ) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        num_rows = len(sizes) * len(rules)

        def show_finished(what: str, part_done: float) -> None:
            show(what, (len(rows) + part_done) / num_rows)

        for size in sizes:
            for rule in rules:
                rows.append(_row(settings, requests, size, load, rule, num_replicas, show_finished))
        return rows

    return predict


def _row(
    settings: PredictorSettings,
    requests: Sequence[PredictedRequest],
    size: CacheSize,
    load: Load,
    rule: str,
    num_replicas: int,
    show: Show,
) -> dict[str, Any]:
    def show_finished(finished: int) -> None:
        show(f"{num_replicas} KV caches of {size}, {rule}", finished / len(requests))

    show_finished(0)
    costs, arrivals_s = load.costs, load.arrivals_s
    online = arrivals_s is not None
    with simulated_replicas(
        settings, size, num_replicas, costs, requests, online=online, on_progress=show_finished
    ) as found:
        if arrivals_s is None:
            outcome = found.run(
                offline(rule, found, costs), _WINDOW_PER_RUNNING * found.max_running
            )
        else:
            outcome = found.serve(ONLINE[rule](found, costs), arrivals_s)
    return {"KV cache": str(size), "router": rule, **_numbers(outcome, online)}


def _numbers(outcome: Outcome, online: bool) -> dict[str, Any]:
    numbers = {
        "hit_rate": outcome.hit_rate,
        "makespan_s": outcome.makespan_s,
        "max_over_mean_load": outcome.imbalance,
    }
    if online:
        first_token_s = [each.first_token_after_s(0.0) for each in outcome.courses]
        p50, p99 = np.percentile(first_token_s, (50, 99)).tolist()
        numbers |= {"first_token_p50_s": p50, "first_token_p99_s": p99}
    return numbers

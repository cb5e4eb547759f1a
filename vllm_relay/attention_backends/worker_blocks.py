# SPDX-License-Identifier: Apache-2.0
"""The KV blocks of a worker's requests on the host, followed from step to step.

Model runner V2 keeps block tables on the device alone. What requests share changes only when one of
them begins, is resumed or ends, so that steps in between need not look.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Any

import numpy as np

from vllm_relay.attention_backends.block_order import BlockOrder


class WorkerBlocks:
    """What a worker was told about its requests.

    Attributes:
        num_changes: requests that began, were resumed or ended so far.
        batch: names the requests of the running step in `req_ids`: model runner V1's own, or V2's.
        is_drafting: model runner V2 is not at the attention of the model itself.
    """

    def __init__(self) -> None:
        self.num_changes = 0
        self.batch: Any = None
        self.is_drafting = False
        self._kv_cache_config: Any = None
        self._rows: dict[str, int] = {}
        self._free: list[int] = []
        self._orders: list[BlockOrder] = []  # by KV cache group

    def begin_step(self, worker: Any, scheduler_output: Any) -> None:
        """Takes over which requests begin, grow and have ended."""
        runner = worker.model_runner
        self.batch = getattr(runner, "input_batch", None)
        self._kv_cache_config = runner.kv_cache_config
        while len(self._orders) < len(self._kv_cache_config.kv_cache_groups):
            self._orders.append(BlockOrder())
        for request_id in scheduler_output.finished_req_ids:
            self._end(request_id)
        for new in scheduler_output.scheduled_new_reqs:
            self._begin(new.req_id, new.block_ids)
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                self._begin(request_id, block_ids or ())
            elif block_ids is not None:
                self._append(self._rows[request_id], block_ids)

    def begin_batch(self, batch: Any) -> None:
        """Takes over who is where in a step of model runner V2."""
        self.batch, self.is_drafting = batch, False

    def end_batch(self) -> None:
        """What attention is told from here on is of drafts."""
        self.is_drafting = True

    def request_ids(self, num_requests: int) -> list[str]:
        """Of the running step, as far as it has real requests; none where one of them was never
        told of, as in batches that are made up to capture graphs."""
        request_ids = [] if self.batch is None else list(self.batch.req_ids[:num_requests])
        return request_ids if all(map(self._rows.__contains__, request_ids)) else []

    def group_of(self, layer_name: str) -> int:
        """The KV cache group of a layer.

        Raises:
            ValueError: it is in none.
        """
        groups = self._kv_cache_config.kv_cache_groups
        for number, group in enumerate(groups):
            if layer_name in group.layer_names:
                return number
        raise ValueError(f"layer {layer_name} is in none of the {len(groups)} KV cache groups")

    def block_size(self, group: int) -> int:
        """Tokens per block of a KV cache group, as the scheduler counts them."""
        return int(self._kv_cache_config.kv_cache_groups[group].kv_cache_spec.block_size)

    def rows(self, request_ids: Sequence[str]) -> np.ndarray:
        """int64 [requests]: the row of each in the orders, -1 where nobody has told of it."""
        rows = map(self._rows.get, request_ids, repeat(-1))
        return np.fromiter(rows, np.int64, len(request_ids))

    def order(self, group: int) -> BlockOrder:
        """The blocks of a KV cache group."""
        return self._orders[group]

    def _begin(self, request_id: str, block_ids: Sequence[Sequence[int]]) -> None:
        self._end(request_id)
        self.num_changes += 1
        row = self._free.pop() if self._free else len(self._rows)
        self._rows[request_id] = row
        for group, order in enumerate(self._orders):
            order.begin(row, block_ids[group] if group < len(block_ids) else ())

    def _append(self, row: int, block_ids: Sequence[Sequence[int]]) -> None:
        for group, ids in enumerate(block_ids):
            self._orders[group].append(row, ids)

    def _end(self, request_id: str) -> None:
        row = self._rows.pop(request_id, None)
        if row is not None:
            self.num_changes += 1
            self._free.append(row)
            for order in self._orders:
                order.end(row)


state = WorkerBlocks()

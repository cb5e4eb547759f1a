# SPDX-License-Identifier: Apache-2.0
"""The KV blocks of a worker's requests on the host, followed from step to step.

Model runner V2 keeps block tables on the device alone. What requests share changes only when one of
them begins, is resumed or ends, so that steps in between need not look.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

_FIRST_REQUESTS, _FIRST_BLOCKS = 64, 256


class WorkerBlocks:
    """What a worker was told about its requests.

    Attributes:
        num_changes: requests that began, were resumed or ended so far.
        batch: names the requests of the running step in `req_ids`: model runner V1's own, or V2's.
    """

    def __init__(self) -> None:
        self.num_changes = 0
        self.batch: Any = None
        self._kv_cache_config: Any = None
        self._rows: dict[str, int] = {}
        self._free: list[int] = []
        self._tables: list[np.ndarray] = []  # int32 [rows, blocks], by KV cache group
        self._lens: list[np.ndarray] = []  # int64 [rows]

    def begin_step(self, worker: Any, scheduler_output: Any) -> None:
        """Takes over which requests begin, grow and have ended."""
        runner = worker.model_runner
        self.batch = getattr(runner, "input_batch", None)
        self._kv_cache_config = runner.kv_cache_config
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
        self.batch = batch

    def request_ids(self, num_requests: int) -> list[str]:
        """Of the running step, as far as it has real requests; none where one of them was never
        told of, as in batches that are made up to capture graphs."""
        request_ids = [] if self.batch is None else list(self.batch.req_ids[:num_requests])
        return request_ids if all(each in self._rows for each in request_ids) else []

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

    def block_table(self, group: int, request_ids: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """
        Returns:
            block_table: int32 [requests, blocks]; behind those of a request anything may stand.
            num_blocks: int64 [requests], 0 for requests nobody has told of.
        """
        if group >= len(self._tables):
            return np.zeros((len(request_ids), 0), np.int32), np.zeros(len(request_ids), np.int64)
        rows = np.array([self._rows.get(each, -1) for each in request_ids], np.int64)
        num_blocks = np.where(rows < 0, 0, self._lens[group][rows])
        return self._tables[group][rows, : int(num_blocks.max(initial=0))], num_blocks

    def _begin(self, request_id: str, block_ids: Sequence[Sequence[int]]) -> None:
        self.num_changes += 1
        while len(self._tables) < len(block_ids):
            self._tables.append(np.zeros((_FIRST_REQUESTS, _FIRST_BLOCKS), np.int32))
            self._lens.append(np.zeros(_FIRST_REQUESTS, np.int64))
        row = self._rows.get(request_id)
        if row is None:
            row = self._free.pop() if self._free else len(self._rows)
            self._rows[request_id] = row
        for group, lens in enumerate(self._lens):
            if row >= len(lens):
                self._lens[group] = np.concatenate((lens, np.zeros_like(lens)))
                table = self._tables[group]
                self._tables[group] = np.concatenate((table, np.zeros_like(table)))
            self._lens[group][row] = 0
        self._append(row, block_ids)

    def _append(self, row: int, block_ids: Sequence[Sequence[int]]) -> None:
        for group, ids in enumerate(block_ids):
            begin = int(self._lens[group][row])
            end = begin + len(ids)
            table = self._tables[group]
            if end > table.shape[1]:
                more = max(end - table.shape[1], table.shape[1])
                self._tables[group] = table = np.pad(table, ((0, 0), (0, more)))
            table[row, begin:end] = ids
            self._lens[group][row] = end

    def _end(self, request_id: str) -> None:
        row = self._rows.pop(request_id, None)
        if row is not None:
            self.num_changes += 1
            self._free.append(row)


state = WorkerBlocks()

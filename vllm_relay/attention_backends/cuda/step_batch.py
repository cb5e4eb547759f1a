# SPDX-License-Identifier: Apache-2.0
"""The requests of a step as the host knows them, and what they share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_relay.attention_backends.cost import KernelCost
from vllm_relay.attention_backends.forest import Forest, build_forest
from vllm_relay.attention_backends.groups import plan_stats, that_pay
from vllm_relay.attention_backends.step_stats import recorder
from vllm_relay.attention_backends.worker_blocks import WorkerBlocks
from vllm_relay.attention_backends.worker_blocks import state as worker_blocks
from vllm_relay.vllm_changes.worker.steps import call_around_attention, call_before_each_step


def follow_blocks(vllm_config: Any) -> WorkerBlocks:
    """Lets `worker_blocks` know of the steps of this process."""
    call_before_each_step("blocks", worker_blocks.begin_step)
    worker_blocks.is_drafting = vllm_config.use_v2_model_runner
    if vllm_config.use_v2_model_runner:
        call_around_attention("blocks", worker_blocks.begin_batch, worker_blocks.end_batch)
    return worker_blocks


@dataclass(frozen=True, eq=False)
class StepBatch:
    """The first requests of a step.

    Attributes:
        blocks: of the worker.
        request_ids: none in batches that are made up; rows behind them pad a step.
        query_start_loc: int32 [requests + 1].
        seq_lens: int32 [requests]: upper bounds, query tokens included.
        moved: makes of a worker's block table, given tokens per block, the one that kernels get;
            None where they are the same.
        moves: what `moved` follows from.
    """

    blocks: WorkerBlocks
    request_ids: list[str]
    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    moved: Callable[[np.ndarray, int], np.ndarray] | None = None
    moves: bytes = b""

    @staticmethod
    def of(blocks: WorkerBlocks, common: CommonAttentionMetadata, num_requests: int) -> StepBatch:
        assert common.seq_lens_cpu_upper_bound is not None
        return StepBatch(
            blocks,
            blocks.request_ids(num_requests),
            common.query_start_loc_cpu.numpy()[: num_requests + 1],
            common.seq_lens_cpu_upper_bound.numpy()[:num_requests],
        )

    @cached_property
    def query_lens(self) -> np.ndarray:
        return self.query_start_loc[1:] - self.query_start_loc[:-1]

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """The same as long as the same requests share the same."""
        starts = self.query_start_loc.tobytes()
        return self.blocks.num_changes, self.request_ids, starts, self.moves

    def groups(
        self,
        layer_name: str,
        sharing_lens: np.ndarray,
        tokens: np.ndarray,
        *,
        group_size: int,
        cost: KernelCost,
        min_shared_tokens: int,
        max_states: int | None = None,
        coarse_tokens: int = 1,
    ) -> Forest:
        """What is worth reading together.

        Args:
            layer_name: of any layer of the KV cache group.
            sharing_lens: int [requests]: query tokens, 0 for requests that share nothing.
            tokens: int [requests]: that all query tokens of a request see.
            group_size: query heads per kv head.
            max_states: where requests would have more than this, one of each group they are in,
                shared ranges end at multiples of `coarse_tokens`.
        """
        num_requests, blocks = len(self.seq_lens), self.blocks
        if len(self.request_ids) < 2:
            return Forest.none(num_requests)
        group = blocks.group_of(layer_name)
        block_size, order = blocks.block_size(group), blocks.order(group)
        padding = [""] * (num_requests - len(self.request_ids))
        rows = blocks.rows(self.request_ids + padding)
        # requests of dummy runs have blocks that nobody has told of
        is_known = order.num_blocks(rows) * block_size >= self.seq_lens
        sharing_lens = sharing_lens * is_known
        tokens = np.where(sharing_lens > 0, tokens, 0)
        if self.moved is None:
            found = order.forest(rows, tokens, block_size)
        else:
            found = build_forest(self.moved(order.table(rows), block_size), tokens, block_size)
        if max_states is not None and found.num_memberships > max_states:
            found = found.in_multiples(coarse_tokens)
        return that_pay(found, sharing_lens * group_size, cost, min_shared_tokens)

    def record(self, forest: Forest, started_s: float) -> None:
        """Counts what was planned since `started_s`."""
        planning_time_s = time.perf_counter() - started_s
        recorder.add_plan(plan_stats(forest, self.query_lens, self.seq_lens, None, planning_time_s))


def requests_behind(
    common: CommonAttentionMetadata, num_decodes: int, num_decode_tokens: int
) -> CommonAttentionMetadata:
    """The requests behind the first `num_decodes` as a batch of their own."""
    rows = slice(num_decodes, None)

    def sliced(name: str, part: slice) -> dict[str, Any]:
        value = getattr(common, name, None)
        return {} if value is None else {name: value[part]}

    return common.replace(
        query_start_loc=common.query_start_loc[rows] - num_decode_tokens,
        query_start_loc_cpu=common.query_start_loc_cpu[rows] - num_decode_tokens,
        seq_lens=common.seq_lens[rows],
        num_reqs=common.num_reqs - num_decodes,
        num_actual_tokens=common.num_actual_tokens - num_decode_tokens,
        block_table_tensor=common.block_table_tensor[rows],
        slot_mapping=common.slot_mapping[num_decode_tokens:],
        _num_computed_tokens_cache=None,
        _token_to_req_indices_cache=None,
        **sliced("seq_lens_cpu_upper_bound", rows),
        **sliced("is_prefilling", rows),
        **sliced("req_idx", rows),
        **sliced("positions", slice(num_decode_tokens, None)),
    )

# SPDX-License-Identifier: Apache-2.0
"""The nodes of the last step, which the steps behind it read too until requests change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_relay.attention_backends.cuda.flash.attention import NodeBuffers, NodeShapes
from vllm_relay.attention_backends.cuda.flash.nodes import CALL_BYTES, FLASH_COST, node_batch
from vllm_relay.attention_backends.cuda.step_batch import StepBatch
from vllm_relay.attention_backends.forest import Forest


@dataclass(frozen=True, eq=False)
class PlannedNodes:
    """The nodes that the buffers hold."""

    key: tuple[Any, ...]
    forest: Forest
    shapes: NodeShapes
    pays: bool
    """Whether they save more than a call of their own costs."""


class NodePlans:
    """Has the buffers hold the nodes of each step.

    Args:
        layer_name: of any layer of the KV cache group.
        min_shared_tokens: shared ranges below this are left alone.
        max_query_len: query tokens of a decode, at most.
        token_bytes: of KV cache in one layer.
    """

    def __init__(
        self,
        buffers: NodeBuffers,
        *,
        layer_name: str,
        min_shared_tokens: int,
        token_bytes: int,
        max_query_len: int = 1,
    ) -> None:
        self.buffers, self.layer_name = buffers, layer_name
        self.min_shared_tokens, self.token_bytes = min_shared_tokens, token_bytes
        self.max_query_len = max_query_len
        self._planned: PlannedNodes | None = None

    def plan(self, batch: StepBatch, num_tokens: int, num_sharing: int) -> PlannedNodes:
        """Uploads the nodes of a step, if they are not there.

        Args:
            num_tokens: of the step, with those behind the batch's that pad it.
            num_sharing: requests that may share something, the first ones.
        """
        key, planned = (*batch.key, num_tokens, num_sharing), self._planned
        # a request has fewer tokens than before where a KV connector failed to load some
        if (
            planned is None
            or planned.key != key
            or (planned.forest.shared_tokens > self._before_queries(batch)).any()
        ):
            groups, buffers = self._groups(batch, num_sharing), self.buffers
            forest, nodes = node_batch(groups, batch.query_start_loc, buffers.setup, buffers.limits)
            buffers.upload(nodes, num_tokens)
            pays = forest.saved_tokens * self.token_bytes > CALL_BYTES
            self._planned = planned = PlannedNodes(key, forest, NodeShapes.of(nodes), pays)
        return planned

    def _before_queries(self, batch: StepBatch) -> np.ndarray:
        """int [requests]: tokens before those that ask, if no draft of the step before is right."""
        return np.maximum(batch.seq_lens - batch.query_lens - (self.max_query_len - 1), 0)

    def _groups(self, batch: StepBatch, num_sharing: int) -> Forest:
        # prompts gain nothing from rows of others; rows that pad a step have no request
        query_lens = batch.query_lens
        sharing_lens = np.where(query_lens <= self.max_query_len, query_lens, 0)
        sharing_lens[min(num_sharing, len(batch.request_ids)) :] = 0
        return batch.groups(
            self.layer_name,
            sharing_lens,
            self._before_queries(batch),
            group_size=self.buffers.setup.group_size,
            cost=FLASH_COST,
            min_shared_tokens=self.min_shared_tokens,
        )

# SPDX-License-Identifier: Apache-2.0
"""The RELAY_SPARSE attention backend on CUDA: vLLM's hooks.

The device attends to what it holds while the host searches the rest; the two are merged on the
device. All that is copied to the host is gathered first, on the device's own stream, into tensors
that nobody writes again: see docs/sparse.md, "On GPUs".
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionLayer,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_relay.attention_backends.cuda.kernels import kv_cache as triton_kv_cache
from vllm_relay.attention_backends.cuda.prompts import plan_prompts
from vllm_relay.attention_backends.cuda.relay import (
    RelayCudaBackend,
    RelayCudaImpl,
    RelayCudaMetadata,
    RelayCudaMetadataBuilder,
)
from vllm_relay.attention_backends.cuda.step_batch import StepBatch
from vllm_relay.attention_backends.ops import merge_states
from vllm_relay.attention_backends.relay_base import QueryKeyValue
from vllm_relay.attention_backends.sparse.common import (
    attend_on_host,
    fill_first_blocks,
    host_part,
    mirrored_rows,
    set_up_group,
    set_up_layer,
    with_window,
)
from vllm_relay.limits import SPARSE_BACKEND_NAME
from vllm_relay.long_context.host.device_copies import CudaCopies, DeviceCopies
from vllm_relay.long_context.host.mirroring import mirror
from vllm_relay.long_context.host.worker import MirroredRow

MERGED_TOKENS = 1024
"""So many query tokens are merged at once, to bound the memory it takes."""

make_copies: Callable[[torch.device], DeviceCopies] = CudaCopies


@dataclass(kw_only=True)
class RelaySparseCudaMetadata(RelayCudaMetadata):
    """One step of one KV cache group; `mirrored` are its long requests."""

    copies: DeviceCopies
    mirrored: list[MirroredRow]
    mirrored_tokens: torch.Tensor
    """int64 on the device: their rows in the query, one request after the other."""
    asking: list[tuple[int, slice]]
    """Numbers of those that attend to tokens in host memory, and where their rows in the query are
    in `asking_tokens`."""
    asking_tokens: torch.Tensor
    """int64 on the device."""


class RelaySparseCudaMetadataBuilder(RelayCudaMetadataBuilder):
    """Plans what is on the device; the rows of long requests name only the blocks they hold."""

    def __init__(self, kv_cache_spec: AttentionSpec, *args: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, *args, **kwargs)
        self.long_contexts = set_up_group(self.vllm_config, kv_cache_spec, self.layer_names)
        self.copies: DeviceCopies = make_copies(self.device)
        self._moves = np.zeros((2, 0), np.int32)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> Any:
        """A layer waits for the host."""
        return AttentionCGSupport.NEVER

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        **kwargs: Any,
    ) -> RelayCudaMetadata:
        common, rows = common_attn_metadata, {}
        if self.long_contexts is not None:
            assert common.seq_lens_cpu_upper_bound is not None  # exact without drafts
            rows = mirrored_rows(
                self.long_contexts,
                common.block_table_tensor,
                common.query_start_loc_cpu.numpy(),
                common.seq_lens_cpu_upper_bound.numpy(),
            )
        moves = np.zeros((2, common.num_reqs), np.int32)  # where a gap begins, its length
        for number, row in rows.items():
            moves[:, number] = row.residency.sink_end, row.residency.num_host_tokens
        self._moves = moves
        if moves[1].any():
            common = self._compacted(common)
        dense = super().build(common_prefix_len, common, fast_build, **kwargs)
        if not rows:
            return dense
        asking, num_asking = [], 0
        for place, (number, row) in enumerate(rows.items()):
            if not row.residency.num_host_tokens:
                continue
            asking.append((place, slice(num_asking, num_asking + row.num_queries)))
            num_asking += row.num_queries
            # the stock backend would not tell the log-sum-exp
            if dense.prompts is not None and row.first_query >= dense.num_decode_tokens:
                dense.chunks += plan_prompts(
                    np.array([row.first_query, row.last_query], np.int32),
                    np.array([row.num_tokens - row.residency.num_host_tokens], np.int32),
                    common.block_table_tensor[number : number + 1],
                    planner=self.planner,
                )
        mirrored = list(rows.values())
        return RelaySparseCudaMetadata(
            **vars(dense),
            copies=self.copies,
            mirrored=mirrored,
            mirrored_tokens=self._tokens_of(mirrored),
            asking=asking,
            asking_tokens=self._tokens_of([mirrored[place] for place, _ in asking]),
        )

    def _compacted(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """A batch without the tokens in host memory."""
        moves = torch.from_numpy(self._moves)
        there = self.copies.to_device(moves)
        assert common.seq_lens_cpu_upper_bound is not None
        return common.replace(
            block_table_tensor=_moved(
                common.block_table_tensor, there, self.kv_cache_spec.block_size
            ),
            seq_lens=common.seq_lens - there[1],
            seq_lens_cpu_upper_bound=common.seq_lens_cpu_upper_bound - moves[1],
            _num_computed_tokens_cache=None,
        )

    def _batch(self, common: CommonAttentionMetadata, num_requests: int) -> StepBatch:
        batch, moves = super()._batch(common, num_requests), torch.from_numpy(self._moves)
        if not moves[1].any():
            return batch

        def moved(block_table: np.ndarray, block_size: int) -> np.ndarray:
            return _moved(torch.from_numpy(block_table), moves, block_size).numpy()

        return replace(batch, moved=moved, moves=self._moves.tobytes())

    def _tokens_of(self, rows: list[MirroredRow]) -> torch.Tensor:
        tokens = [np.arange(row.first_query, row.last_query) for row in rows]
        return self.copies.to_device(torch.from_numpy(np.concatenate([*tokens, []]).astype(int)))


def _moved(block_table: torch.Tensor, moves: torch.Tensor, block_size: int) -> torch.Tensor:
    """A block table in which the blocks of the window follow those of the sinks.

    Args:
        moves: int32 [2, requests]: tokens before a gap, and in it.
    """
    sink_ends, gaps = moves[:, : len(block_table), None] // block_size
    columns = torch.ones_like(block_table).cumsum(1) - 1
    columns = columns + torch.where(columns >= sink_ends, gaps, 0)
    return block_table.gather(1, columns.clamp(max=block_table.shape[1] - 1))


class RelaySparseCudaImpl(RelayCudaImpl):
    """Attention of one layer: the device's part by RELAY, the host's part beside it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.retrieval = set_up_layer(self)

    def _attend(
        self,
        layer: AttentionLayer,
        given: QueryKeyValue,
        kv_cache: torch.Tensor,
        attn_metadata: RelayCudaMetadata,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        if not isinstance(attn_metadata, RelaySparseCudaMetadata):
            return super()._attend(layer, given, kv_cache, attn_metadata, output, lse)
        query, key, _ = given
        rows, copies = attn_metadata.mirrored, attn_metadata.copies
        long_contexts = rows[0].worker
        name = self.kv_sharing_target_layer_name or layer.layer_name
        shaped = query[:, : self.num_kv_heads] if key is None else key
        parts = [host_part(row, name, shaped) for row in rows]
        if self.kv_sharing_target_layer_name is None:
            size = kv_cache.shape[2]

            def write(keys: torch.Tensor, values: torch.Tensor, block: torch.Tensor) -> None:
                keys, values = (copies.to_device(each.contiguous()) for each in (keys, values))
                slots = block.long() * size + torch.arange(len(keys), device=keys.device)
                triton_kv_cache.write_kv_cache(
                    keys, values, kv_cache, slots, layer._k_scale, layer._v_scale
                )

            fill_first_blocks(rows, parts, size, write)
            mirror(
                rows,
                [part.own for part in parts],
                name,
                attn_metadata.mirrored_tokens,
                given,
                kv_cache,
                copies,
                long_contexts.pending_writes,
            )
        if not attn_metadata.asking:
            return super()._attend(layer, given, kv_cache, attn_metadata, output, lse)
        tokens = attn_metadata.asking_tokens
        lse = query.new_empty(attn_metadata.num_tokens, self.num_heads, dtype=torch.float32)
        arriving = copies.to_host(query.index_select(0, tokens))
        super()._attend(layer, given, kv_cache, attn_metadata, output, lse)
        begin_s = time.perf_counter()
        long_contexts.pending_writes.finish(name)
        reads = [(rows[place], parts[place], at) for place, at in attn_metadata.asking]
        asked = arriving.wait()
        host_output = torch.zeros_like(asked, dtype=torch.float32)
        host_lse = torch.full(asked.shape[:2], -torch.inf)
        attend_on_host(reads, self.retrieval, asked, host_output, host_lse)
        long_contexts.host_seconds += time.perf_counter() - begin_s
        for begin in range(0, len(tokens), MERGED_TOKENS):
            at = slice(begin, begin + MERGED_TOKENS)
            part, part_lse = (copies.to_device(each[at]) for each in (host_output, host_lse))
            own = output.index_select(0, tokens[at]).float(), lse.index_select(0, tokens[at])
            merged, _ = merge_states(*own, part, part_lse)
            output.index_copy_(0, tokens[at], merged.to(output.dtype))


class RelaySparseCudaBackend(RelayCudaBackend):
    """RELAY on CUDA, and a window on the device for long contexts."""

    name = SPARSE_BACKEND_NAME
    impl_cls = RelaySparseCudaImpl
    builder_cls = RelaySparseCudaMetadataBuilder
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto"]

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        return with_window(spec, "exact_resident")

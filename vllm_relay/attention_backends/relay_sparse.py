# SPDX-License-Identifier: Apache-2.0
"""The RELAY_SPARSE attention backend: vLLM's hooks. Long contexts live in `long_context`."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.v1.attention.backend import AttentionLayer
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

from vllm_relay import compat
from vllm_relay.attention_backends import cpu
from vllm_relay.attention_backends.plan import plan_step
from vllm_relay.attention_backends.reference import unpack_kv_cache
from vllm_relay.attention_backends.relay import (
    RelayBackend,
    RelayImpl,
    RelayMetadata,
    RelayMetadataBuilder,
)
from vllm_relay.config import RelayConfig
from vllm_relay.limits import SPARSE_BACKEND_NAME, check_sparse_layer
from vllm_relay.long_context import worker
from vllm_relay.long_context.host_attention import (
    HostPart,
    Retrieval,
    attend_everything,
    attend_retrieved,
)
from vllm_relay.long_context.host_sequence import HostLayer
from vllm_relay.long_context.kv_cache_spec import RelaySparseSpec
from vllm_relay.long_context.window import WindowPolicy
from vllm_relay.long_context.worker_contexts import db_options
from vllm_relay.sparse.context_store import StoredContext
from vllm_relay.sparse.damage import IndexDamagedError
from vllm_relay.sparse.partial_attention import merge
from vllm_relay.sparse.query_types import Dipr
from vllm_relay.stats import recorder

MIN_PACKED_QUERIES = 64
"""From so many query tokens on, packing all tokens for the RELAY kernel pays."""
PACKED_BLOCK_TOKENS = 128


class RelaySparseBackend(RelayBackend):
    """RELAY, and a window on the device for long contexts."""

    @staticmethod
    def get_name() -> str:
        return SPARSE_BACKEND_NAME

    @staticmethod
    def get_impl_cls() -> type[RelayImpl]:
        return RelaySparseImpl

    @staticmethod
    def get_builder_cls() -> type[RelayMetadataBuilder]:
        return RelaySparseMetadataBuilder

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        if type(spec) is not FullAttentionSpec or spec.sliding_window is not None:
            return spec
        vllm_config = _config_of_process()
        options = RelayConfig.from_vllm_config(vllm_config)
        policy = WindowPolicy(
            block_size_tokens=spec.block_size,
            sink_tokens=options.sink_tokens,
            window_tokens=options.window_tokens,
            min_context_tokens=options.min_context_tokens,
            prefill=options.prefill,
        )
        max_blocks = policy.max_blocks(
            vllm_config.model_config.max_model_len, vllm_config.max_in_flight_tokens
        )
        return RelaySparseSpec.of(spec, policy, max_blocks)


@dataclass
class RelaySparseMetadata(RelayMetadata):
    """One step of one KV cache group; `mirrored` are its long requests."""

    mirrored: list[worker.MirroredRow] = field(default_factory=list)


class RelaySparseMetadataBuilder(RelayMetadataBuilder):
    """Plans what is on the device; the rows of long requests name only the blocks they hold."""

    def __init__(self, kv_cache_spec: AttentionSpec, *args: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, *args, **kwargs)
        self.policy = None
        if isinstance(kv_cache_spec, RelaySparseSpec):
            self.policy = kv_cache_spec.policy
            worker.state.set_layers(kv_cache_spec, self.layer_names)
        compat.call_before_each_step(worker.state.begin_step)
        recorder.take_long_contexts = worker.state.take_stats

    def _plan(
        self,
        num_tokens: int,
        block_table: torch.Tensor,
        query_start_loc: np.ndarray,
        seq_lens: np.ndarray,
    ) -> RelayMetadata:
        rows = self._mirrored(block_table, query_start_loc, seq_lens)
        if any(row.residency.num_host_tokens for row in rows.values()):
            block_table, seq_lens = block_table.clone(), seq_lens.copy()
            for number, row in rows.items():
                self._compact(block_table[number].numpy(), row)
                seq_lens[number] -= row.residency.num_host_tokens
        dense = super()._plan(num_tokens, block_table, query_start_loc, seq_lens)
        return RelaySparseMetadata(
            dense.num_tokens, dense.block_table, dense.plan, list(rows.values())
        )

    def _mirrored(
        self, block_table: torch.Tensor, query_start_loc: np.ndarray, seq_lens: np.ndarray
    ) -> dict[int, worker.MirroredRow]:
        """By row of the block table."""
        rows: dict[int, worker.MirroredRow] = {}
        if self.policy is None:
            return rows
        for number, request in enumerate(worker.state.rows(len(seq_lens))):
            first, last = query_start_loc[number : number + 2].tolist()
            num_computed = int(seq_lens[number]) - (last - first)
            if request is None:
                continue
            sequence = worker.state.mirrored(request, self.policy, num_computed, last - first)
            if sequence is None:
                continue
            residency = self.policy.residency(
                num_computed, request.num_prompt_tokens, request.first_resident_token
            )
            placement, request.placement = request.placement, None
            fill_from = None
            if placement is not None and placement.first_resident_token < placement.num_tokens:
                fill_from = placement.first_resident_token
            blocks = block_table[number].numpy()
            rows[number] = worker.MirroredRow(
                request, sequence, first, last, num_computed, residency, fill_from, blocks,
                self.policy.sink_blocks * self.block_size,
            )  # fmt: skip
        return rows

    def _compact(self, blocks: np.ndarray, row: worker.MirroredRow) -> None:
        """Moves the blocks of the window to those of the sinks."""
        sink_end, window_begin = (each // self.block_size for each in row.residency)
        if window_begin > sink_end:
            kept = blocks[window_begin:].copy()
            blocks[sink_end : sink_end + len(kept)] = kept


class RelaySparseImpl(RelayImpl):
    """Attention of one layer: the device's part by RELAY, the host's part beside it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        vllm_config = get_current_vllm_config()
        _remember(vllm_config)
        options = RelayConfig.from_vllm_config(vllm_config)
        self.retrieval = _retrieval_of(options, self.scale)
        self.kernel_choice = options.kernel
        if self.sliding_window is None:
            check_sparse_layer(
                has_alibi=self.alibi_slopes is not None,
                logits_soft_cap=self.logits_soft_cap,
                has_sinks=self.sinks is not None,
            )

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: RelayMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rows: list[worker.MirroredRow] = getattr(attn_metadata, "mirrored", [])
        if not rows:
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale,
                output_block_scale,
            )  # fmt: skip
        assert attn_metadata is not None
        name = self.kv_sharing_target_layer_name or layer.layer_name
        lse = query.new_empty(attn_metadata.num_tokens, self.num_heads, dtype=torch.float32)
        parts = [self._part(row, name, key) for row in rows]
        if self.kv_sharing_target_layer_name is None:
            # first, since a block that one request fills may be a prefix of another
            for row, part in zip(rows, parts, strict=True):
                with _losing_damaged([row]):
                    _fill(row, part, kv_cache)
            for row, part in zip(rows, parts, strict=True):
                at = slice(row.first_query, row.last_query)
                _mirror(row, part.own, key[at], value[at], kv_cache)
                if row.request.trains_indexes:
                    part.own.query = self.retrieval.query
                    grouped = query[at].unflatten(1, (self.num_kv_heads, -1)).permute(1, 2, 0, 3)
                    part.own.train_queries.add(grouped, first_position=row.num_computed_tokens)
        begin_s = time.perf_counter()
        self._attend(query, kv_cache, attn_metadata, output, lse)
        device_done_s = time.perf_counter()
        self._add_host_attention(rows, parts, query, output, lse)
        worker.state.device_seconds += device_done_s - begin_s
        worker.state.host_seconds += time.perf_counter() - device_done_s
        return output

    def _add_host_attention(
        self,
        rows: list[worker.MirroredRow],
        parts: list[HostPart],
        query: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Merges what the host has into the output of what the device has."""
        retrieving: dict[StoredContext | None, list[tuple[worker.MirroredRow, HostPart]]] = {}
        for row, part in zip(rows, parts, strict=True):
            if not row.residency.num_host_tokens or row.request.lost_context_id is not None:
                continue
            if row.retrieves and self.retrieval.query is not None:
                retrieving.setdefault(part.context, []).append((row, part))
                continue
            at = slice(row.first_query, row.last_query)
            with _losing_damaged([row]):
                if row.num_queries >= MIN_PACKED_QUERIES:
                    self._attend_packed(row, part, query[at], output[at])
                else:
                    found = attend_everything(part, query[at], self.scale)
                    merged, _ = merge((output[at].float(), lse[at]), found)
                    output[at] = merged.to(output.dtype)
        for reading in retrieving.values():
            with _losing_damaged([row for row, _ in reading]):
                attend_retrieved(
                    [part for _, part in reading],
                    [row.first_query for row, _ in reading],
                    query,
                    output,
                    lse,
                    self.retrieval,
                    worker.state.stats,
                )

    def _attend_packed(
        self, row: worker.MirroredRow, part: HostPart, query: torch.Tensor, output: torch.Tensor
    ) -> None:
        """Attention of a chunk of a prompt as RELAY computes it where all tokens are on the device:
        they are packed, one layer at a time, into a cache that all layers and steps share."""
        keys, values = part.all_rows()
        num_tokens, size = row.num_tokens, PACKED_BLOCK_TOKENS
        cache = _packed_cache(num_tokens, keys)
        cpu.write_kv_cache(
            keys.transpose(0, 1), values.transpose(0, 1), cache, torch.arange(num_tokens)
        )
        block_table = torch.arange(cache.shape[0], dtype=torch.int32)[None]
        if row.packed_plan is None:
            row.packed_plan = plan_step(
                block_table.numpy(),
                np.array([0, row.num_queries], np.int32),
                np.array([num_tokens], np.int32),
                block_size=size,
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                num_threads=torch.get_num_threads(),
                kernel=cpu.kernel_for(query.dtype, self.kernel_choice),
                forest=None,
            )
        cpu.relay_attention(
            query, cache, block_table, row.packed_plan, output,
            scale=self.scale, num_kv_heads=self.num_kv_heads,
        )  # fmt: skip

    def _part(self, row: worker.MirroredRow, name: str, key: torch.Tensor) -> HostPart:
        return HostPart(
            own=row.sequence.layer(name, key[row.first_query : row.last_query]),
            context=row.request.context,
            layer=worker.state.layer_number(name),
            residency=row.residency,
            num_tokens=row.num_tokens,
            sink_end=row.sink_end,
        )


_caches: list[torch.Tensor] = []


def _packed_cache(num_tokens: int, keys: torch.Tensor) -> torch.Tensor:
    """For keys like these, [kv_heads, tokens, size]; the largest that was asked for is kept."""
    num_kv_heads, _, head_size = keys.shape
    shape = (
        -(-num_tokens // PACKED_BLOCK_TOKENS),
        num_kv_heads,
        PACKED_BLOCK_TOKENS,
        2 * head_size,
    )
    num_elements = math.prod(shape)
    if not _caches or _caches[0].dtype != keys.dtype or _caches[0].numel() < num_elements:
        # zeros: what is behind the last token is multiplied too
        _caches[:] = [torch.zeros(num_elements, dtype=keys.dtype)]
    return _caches[0][:num_elements].view(shape)


@contextlib.contextmanager
def _losing_damaged(rows: list[worker.MirroredRow]) -> Iterator[None]:
    """Where a stored context is damaged, the requests that read it begin again without it."""
    try:
        yield
    except IndexDamagedError as error:
        contexts = {row.request.context for row in rows if row.request.context is not None}
        damaged = {each for each in contexts if getattr(each, "damage", None)} or contexts
        if not damaged:
            raise
        for row in rows:
            if row.request.context in damaged:
                assert row.request.context is not None
                worker.state.lose(row.request, row.request.context.id, f"is damaged: {error}")


def _fill(row: worker.MirroredRow, part: HostPart, kv_cache: torch.Tensor) -> None:
    """Brings the first tokens of the first block that the device has back from the host."""
    if row.fill_from is None or row.request.lost_context_id is not None:
        return
    begin, end, own = row.fill_from, row.num_computed_tokens, part.own
    states = [own.rows(max(begin, own.begin), end)]
    if begin < own.begin:
        states.insert(0, part.context_rows(begin, own.begin))
    keys, values = (torch.cat(parts, 1) for parts in zip(*states, strict=True))
    size = kv_cache.shape[2]
    slot = int(row.blocks[begin // size]) * size
    slots = torch.arange(slot, slot + end - begin)
    cpu.write_kv_cache(keys.transpose(0, 1), values.transpose(0, 1), kv_cache, slots)


def _mirror(
    row: worker.MirroredRow,
    host: HostLayer,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
) -> None:
    """Copies the step's keys and values to the host, and those before that are not there yet: of
    blocks that other requests have computed, and of a request that was short so far."""
    if host.end < row.num_computed_tokens:
        size = kv_cache.shape[2]
        first, last = host.end // size, -(-row.num_computed_tokens // size)
        blocks = torch.from_numpy(row.blocks[first:last].astype(np.int64))
        keys, values = (
            part.transpose(1, 2).flatten(0, 1)[
                host.end - first * size : row.num_computed_tokens - first * size
            ]
            for part in unpack_kv_cache(kv_cache[blocks])
        )
        host.write(host.end, keys, values)
    host.write(row.num_computed_tokens, key, value)


def _retrieval_of(options: RelayConfig, scale: float) -> Retrieval:
    query = None
    if options.alpha > 0:
        query = Dipr(alpha=options.alpha, scale=scale, max_dropped_mass=options.max_dropped_mass)
    return Retrieval(query, db_options(options), scale)


_config: list[VllmConfig] = []


def _remember(vllm_config: VllmConfig) -> None:
    _config[:] = [vllm_config]


def _config_of_process() -> VllmConfig:
    """That of the engine whose layers were built last: `customize_spec` is given none."""
    return _config[0]

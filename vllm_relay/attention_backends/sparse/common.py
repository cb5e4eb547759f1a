# SPDX-License-Identifier: Apache-2.0
"""What RELAY_SPARSE does alike on every device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

from vllm_relay.attention_backends.step_stats import recorder
from vllm_relay.config import RelayConfig
from vllm_relay.config.long_contexts import PrefillMode
from vllm_relay.limits import check_sparse_layer
from vllm_relay.long_context.host.host_attention import (
    HostPart,
    Retrieval,
    attend_everything,
    attend_retrieved,
)
from vllm_relay.long_context.host.worker import (
    LongContextWorker,
    MirroredRow,
    make_worker,
    worker_of,
)
from vllm_relay.long_context.host.worker_contexts import db_options
from vllm_relay.long_context.scheduling.kv_cache_spec import RelaySparseSpec
from vllm_relay.long_context.window import WindowPolicy
from vllm_relay.sparse.contexts.context_store import StoredContext
from vllm_relay.sparse.files.damage import IndexDamagedError
from vllm_relay.sparse.index.query_types import Dipr
from vllm_relay.vllm_changes.worker.steps import call_around_attention, call_before_each_step

_config: list[VllmConfig] = []
"""Of the engine whose layers were built last: `customize_spec` is given none."""


def with_window(spec: AttentionSpec, default_prefill: PrefillMode) -> AttentionSpec:
    """The spec of a layer: with a window if it has full attention."""
    if type(spec) is not FullAttentionSpec or spec.sliding_window is not None:
        return spec
    [vllm_config] = _config
    options = RelayConfig.from_vllm_config(vllm_config)
    policy = WindowPolicy(
        block_size_tokens=spec.block_size,
        sink_tokens=options.sink_tokens,
        window_tokens=options.window_tokens,
        min_context_tokens=options.min_context_tokens,
        prefill=options.prefill or default_prefill,
    )
    max_blocks = policy.max_blocks(
        vllm_config.model_config.max_model_len, vllm_config.max_in_flight_tokens
    )
    return RelaySparseSpec.of(spec, policy, max_blocks)


def set_up_layer(impl: Any) -> Retrieval:
    """Checks a layer when it is built; returns what its tokens read of the host's.

    Args:
        impl: vLLM's AttentionImpl of the layer.

    Raises:
        RelayUnsupportedError: its tokens may not leave the device.
    """
    vllm_config = get_current_vllm_config()
    _config[:] = [vllm_config]
    if impl.sliding_window is None:
        check_sparse_layer(
            has_alibi=impl.alibi_slopes is not None,
            logits_soft_cap=impl.logits_soft_cap,
            has_sinks=impl.sinks is not None,
        )
    options, query = RelayConfig.from_vllm_config(vllm_config), None
    if options.alpha > 0:
        query = Dipr(
            alpha=options.alpha,
            scale=impl.scale,
            max_dropped_mass=options.max_dropped_mass,
            estimate=options.estimate_unread and options.max_dropped_mass is None,
        )
    return Retrieval(query, db_options(options), impl.scale)


def set_up_group(
    vllm_config: VllmConfig, kv_cache_spec: AttentionSpec, layer_names: Sequence[str]
) -> LongContextWorker | None:
    """For a KV cache group, when its metadata builder is made: who knows its long requests; None
    where all tokens stay on the device."""
    long_contexts = make_worker(vllm_config)
    call_before_each_step("long_contexts", begin_step)
    if vllm_config.use_v2_model_runner:
        call_around_attention("long_contexts", begin_batch, begin_batch)
    if not isinstance(kv_cache_spec, RelaySparseSpec):
        return None
    options = RelayConfig.from_vllm_config(vllm_config)
    long_contexts.set_layers(kv_cache_spec, layer_names, options)
    return long_contexts


_running: list[LongContextWorker] = []
"""That of the step that is executed in this process, if it has one."""


def begin_batch(batch: Any = None) -> None:
    """Who is where in a step of model runner V2; None: what attention is told is of others."""
    for long_contexts in _running:
        long_contexts.batch = batch


def begin_step(vllm_worker: Any, scheduler_output: Any) -> None:
    """A worker of this process executes a step: one of RELAY_SPARSE, or of another engine."""
    long_contexts = worker_of(vllm_worker.vllm_config)
    recorder.take_long_contexts = None
    _running.clear()
    if long_contexts is not None:
        _running.append(long_contexts)
        recorder.take_long_contexts = long_contexts.take_stats
        long_contexts.begin_step(vllm_worker, scheduler_output)


def mirrored_rows(
    long_contexts: LongContextWorker | None,
    blocks: Any,
    query_start_loc: np.ndarray,
    seq_lens: np.ndarray,
) -> dict[int, MirroredRow]:
    """The long requests of a step, by row of the block table.

    Args:
        long_contexts: what `set_up_group` returned.
        blocks: the block table, an array or a tensor.
        query_start_loc, seq_lens: on the host.
    """
    rows: dict[int, MirroredRow] = {}
    if long_contexts is None:
        return rows
    policy = long_contexts.policy
    for number, request in long_contexts.mirrored_requests(seq_lens):
        first, last = query_start_loc[number : number + 2].tolist()
        num_computed = int(seq_lens[number]) - (last - first)
        sequence = long_contexts.sequence_of(request)
        residency = policy.residency(
            num_computed, request.num_prompt_tokens, request.first_resident_token
        )
        placement, request.placement = request.placement, None
        fill_from = None
        if placement is not None and placement.first_resident_token < placement.num_tokens:
            fill_from = placement.first_resident_token
        rows[number] = MirroredRow(
            long_contexts, request, sequence, first, last, num_computed, residency, fill_from,
            blocks[number],
        )  # fmt: skip
    return rows


def host_part(row: MirroredRow, layer_name: str, keys: torch.Tensor) -> HostPart:
    """Args: keys: any of the layer, [tokens, kv_heads, size], for their shape and dtype."""
    return HostPart(
        own=row.sequence.layer(layer_name, keys),
        context=row.request.context,
        layer=row.worker.layer_numbers[layer_name],
        residency=row.residency,
        num_tokens=row.num_tokens,
    )


def fill_first_blocks(
    rows: Sequence[MirroredRow],
    parts: Sequence[HostPart],
    block_size: int,
    write: Callable[[torch.Tensor, torch.Tensor, Any], None],
) -> None:
    """Brings what the first block of each request on the device lacks back from the host. It comes
    before all else, since a block that one request fills may be a prefix of another.

    Args:
        write: stores keys and values [tokens, kv_heads, size] in the first slots of a block; given
            as `row.blocks` has it.
    """
    for row, part in zip(rows, parts, strict=True):
        if row.fill_from is None or row.request.lost_context_id is not None:
            continue
        begin, end, own = row.fill_from, row.num_computed_tokens, part.own
        with losing_damaged([row]):
            states = [own.rows(max(begin, own.begin), end)]
            if begin < own.begin:
                states.insert(0, part.context_rows(begin, own.begin))
            keys, values = (
                torch.cat(each, 1).transpose(0, 1) for each in zip(*states, strict=True)
            )
            write(keys, values, row.blocks[begin // block_size])


def attend_on_host(
    reads: Sequence[tuple[MirroredRow, HostPart, slice]],
    retrieval: Retrieval,
    query: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    *,
    with_device: bool = False,
    kernel: str = "auto",
) -> None:
    """Attention over tokens in host memory, in one call for all requests that read the same
    context; none for those that have to begin again. Generated tokens add what they retrieve to
    `output` and `lse`; what prompts see, and all where nothing is retrieved, is written there.

    Args:
        reads: requests, and their rows in the tensors.
        query, output: [tokens, heads, head_size].
        lse: float32 [tokens, heads].
        with_device: what is written is over the host's copy of all tokens, those on the device
            among them, and `lse` stays as it is.
        kernel: of what is written.
    """
    asked = query.to(output.dtype)
    groups: dict[tuple[bool, StoredContext | None], list[tuple[MirroredRow, HostPart, slice]]] = {}
    for row, part, at in reads:
        if row.request.lost_context_id is None:
            retrieves = row.retrieves and retrieval.query is not None
            groups.setdefault((retrieves, part.context), []).append((row, part, at))
    for (retrieves, _), group in groups.items():
        rows, parts, places = zip(*group, strict=True)
        with losing_damaged(rows):
            if retrieves:
                tokens, stats = [at.start for at in places], rows[0].worker.stats
                attend_retrieved(parts, tokens, asked, output, lse, retrieval, stats)
            else:
                attend_everything(
                    parts, places, query, output, None if with_device else lse, retrieval.scale,
                    with_device=with_device, kernel=kernel,
                )  # fmt: skip


@contextlib.contextmanager
def losing_damaged(rows: Sequence[MirroredRow]) -> Iterator[None]:
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
                row.worker.lose(row.request, row.request.context.id, f"is damaged: {error}")

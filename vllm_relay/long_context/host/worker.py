# SPDX-License-Identifier: Apache-2.0
"""What a worker knows of the requests of a step, and the host's part of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm_relay.config import RelayConfig
from vllm_relay.long_context.host.device_copies import PendingWrites
from vllm_relay.long_context.host.host_sequence import (
    EncodingBudget,
    HostSequence,
    SequencePlace,
    return_free_memory,
)
from vllm_relay.long_context.host.index_builders import start_builders
from vllm_relay.long_context.host.worker_contexts import WorkerContexts, db_options
from vllm_relay.long_context.orders import (
    LongContextStats,
    Placement,
    StepOrders,
    asks_to_be_kept,
    orders_of,
)
from vllm_relay.long_context.scheduling.kv_cache_spec import RelaySparseSpec
from vllm_relay.long_context.window import Residency, WindowPolicy
from vllm_relay.sparse.contexts.context_fingerprint import ContextFingerprint
from vllm_relay.sparse.contexts.context_store import StoredContext
from vllm_relay.sparse.contexts.disk.context_folder import rank_folder
from vllm_relay.sparse.contexts.model_fingerprint import (
    config_fingerprint,
    fingerprint_of,
    weights_digest,
)
from vllm_relay.sparse.contexts.retrieval import SessionStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.relay")


@dataclass
class LongRequest:
    """A request, as far as its tokens may leave the device.

    Attributes:
        trains_indexes: it becomes a context, whose indexes learn from its queries.
        first_resident_token: the tokens before it were never on the device.
        sequence: in host memory; None as long as all tokens are on the device.
        context: whose tokens it reuses: those before `sequence.begin`.
        placement: where it began, in the step in which it begins.
        lost_context_id: of the context that it reuses and that cannot be read; the scheduler lets
            it begin again.
    """

    id: str
    num_prompt_tokens: int
    max_tokens: int
    trains_indexes: bool = False
    first_resident_token: int = 0
    sequence: HostSequence | None = None
    context: StoredContext | None = None
    placement: Placement | None = None
    lost_context_id: str | None = None

    @property
    def computes_prompt(self) -> bool:
        """Whether the host has a part of its prompt, and the others are still to come."""
        if self.sequence is None:
            return False
        ends = [layer.end for layer in self.sequence.layers.values()]
        return bool(ends) and max(ends) < self.num_prompt_tokens


@dataclass
class MirroredRow:
    """A request of a step, whose new keys and values are copied to the host.

    Attributes:
        worker: that the request is of.
        first_query, last_query: its rows in the query.
        num_computed_tokens: before the step.
        residency: what the device holds of it.
        fill_from: the tokens from here to `num_computed_tokens` are the host's, and have to be
            brought to their block on the device; None: there are none.
        blocks: int32; its row of the block table, before it was compacted.
    """

    worker: LongContextWorker
    request: LongRequest
    sequence: HostSequence
    first_query: int
    last_query: int
    num_computed_tokens: int
    residency: Residency
    fill_from: int | None
    blocks: Any

    @property
    def num_queries(self) -> int:
        return self.last_query - self.first_query

    @property
    def retrieves(self) -> bool:
        """Whether it is a generated token that asks, or the last one of a prompt of which a stored
        context has all others; tokens of prompts read everything."""
        request = self.request
        is_decoded = self.num_computed_tokens >= request.num_prompt_tokens
        follows_context = (
            request.context is not None and self.num_computed_tokens == self.sequence.begin
        )
        return self.num_queries == 1 and (is_decoded or follows_context)

    @property
    def num_tokens(self) -> int:
        """Those of the step included."""
        return self.num_computed_tokens + self.num_queries


@dataclass
class LongContextWorker:
    """The requests of one engine's worker, and its contexts.

    Attributes:
        readers: those of `requests` that go on behind a stored context.
        layer_numbers: of its layers, in stored contexts.
    """

    requests: dict[str, LongRequest] = field(default_factory=dict)
    readers: dict[str, LongRequest] = field(default_factory=dict)
    contexts: WorkerContexts | None = None
    pending_writes: PendingWrites = field(default_factory=PendingWrites)
    encoding: EncodingBudget = field(default_factory=EncodingBudget)
    stats: SessionStats = field(default_factory=SessionStats)
    host_seconds: float = 0.0
    device_seconds: float = 0.0
    max_model_len: int = 0
    _not_kept: dict[str, str] = field(default_factory=dict)  # request -> context
    _reads_contexts: bool = False  # since statistics were taken; equal in all ranks
    layer_numbers: dict[str, int] = field(default_factory=dict)
    _spec: RelaySparseSpec | None = None
    _is_searched: bool = True
    _plans_indexes: bool = True
    batch: Any = None
    """Names the requests of the running step in `req_ids`; None while attention is of others."""
    _builders: ThreadPoolExecutor | None = None

    def set_layers(
        self, spec: RelaySparseSpec, layer_names: Sequence[str], options: RelayConfig
    ) -> None:
        """The engine's layers whose tokens leave the device: those of one KV cache group."""
        self.close_contexts()
        if self._builders is not None:
            self._builders.shutdown(wait=False, cancel_futures=True)
            self._builders = None
        self.requests.clear()
        self.readers.clear()
        self.pending_writes = PendingWrites()
        self._spec = spec
        self._is_searched = options.alpha > 0
        self._plans_indexes = db_options(options).index == "auto"
        self.layer_numbers = {name: number for number, name in enumerate(layer_names)}

    def open_contexts(self, worker: Any) -> WorkerContexts:
        """The contexts of this worker, and of its folder; read at the first call."""
        if self.contexts is None:
            if self._spec is None:
                raise RuntimeError("the layers of RELAY_SPARSE are not set up yet")
            options = RelayConfig.from_vllm_config(worker.vllm_config)
            num_ranks = worker.vllm_config.parallel_config.tensor_parallel_size
            path = None
            if options.context_dir is not None:
                folder = Path(options.context_dir).expanduser()
                path = rank_folder(folder, worker.rank % num_ranks, num_ranks)
            if self._builders is None:
                self._builders = start_builders(options.index_threads)
            self.contexts = WorkerContexts(
                path,
                self._fingerprint(worker, worker.rank % num_ranks, num_ranks),
                list(self.layer_numbers),
                db_options(options),
                self._builders,
            )
        return self.contexts

    def _fingerprint(self, worker: Any, rank: int, num_ranks: int) -> ContextFingerprint:
        """Whose keys and values the worker computes."""
        assert self._spec is not None
        model_config = worker.vllm_config.model_config
        fields = {
            **config_fingerprint(model_config.hf_text_config),
            "weights": weights_digest(worker.model_runner.get_model()),
            "quantization": model_config.quantization,
            "rank": [rank, num_ranks],
        }
        return fingerprint_of(
            str(model_config.hf_text_config.model_type),
            fields,
            num_layers=len(self.layer_numbers),
            num_kv_heads=self._spec.num_kv_heads,
            head_size=self._spec.head_size,
            dtype=self._spec.dtype,
        )

    def take_stats(self) -> LongContextStats:
        """What was counted since the last call."""
        stats, self.stats = self.stats, SessionStats()
        taken = LongContextStats(
            host_searches=stats.searches,
            host_searched_tokens=stats.searched_tokens,
            host_retrieved_tokens=stats.retrieved_tokens,
            host_read_bytes=stats.bytes,
            host_seconds=self.host_seconds,
            device_seconds=self.device_seconds,
            host_dropped_mass=stats.dropped_mass or 0.0,
        )
        taken.lost, self._not_kept = self._not_kept, {}
        if self._reads_contexts:
            taken.lost |= {
                each.id: each.lost_context_id
                for each in self.readers.values()
                if each.lost_context_id is not None
            }
            taken.lost = lost_in_any_rank(taken.lost)
            self._reads_contexts = False
            for context_id in set(taken.lost.values()):  # in the other ranks too
                self._give_up(context_id, "a rank cannot read it")
        self.host_seconds = self.device_seconds = 0.0
        if self.contexts is not None:
            taken.index_builds_queued = self.contexts.num_queued
            taken.reports = self.contexts.take_changes()
        return taken

    def close_contexts(self) -> None:
        """Lets go of all contexts; requests that read one go on."""
        if self.contexts is not None:
            self.contexts.close()
            self.contexts = None

    def begin_step(self, worker: Any, scheduler_output: Any) -> None:
        """Takes over what the scheduler says of the step: its requests, and those that ended."""
        self.batch = getattr(worker.model_runner, "input_batch", None)  # runner V2 has none yet
        self.max_model_len = worker.model_config.max_model_len
        self.pending_writes.finish()
        self.encoding.renew()
        orders = orders_of(scheduler_output)
        self._reads_contexts |= bool(self.readers)
        frees_memory = bool(orders.deleted or orders.dropped)
        for context_id in orders.deleted:  # before one of them is kept again
            self.open_contexts(worker).delete(context_id)
        for request_id in scheduler_output.finished_req_ids:
            request = self.requests.pop(request_id, None)
            self.readers.pop(request_id, None)
            kept = orders.kept.get(request_id)
            if request is None or request.sequence is None:
                continue
            frees_memory = True
            if kept is None:
                continue
            contexts = self.open_contexts(worker)
            if not contexts.keep(kept, request.sequence, request.context):
                self._not_kept[request_id] = kept.context_id
        for request_id in orders.dropped:
            self.readers.pop(request_id, None)
            if request_id in self.requests:
                request = self.requests[request_id]
                request.sequence = request.context = None
        for new in scheduler_output.scheduled_new_reqs:
            if new.req_id not in self.requests:
                self.requests[new.req_id] = self._new_request(new)
            self._place(new.req_id, orders)
        for request_id in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            self._place(request_id, orders)
        self._reads_contexts |= bool(self.readers)
        if frees_memory or any(each.computes_prompt for each in self.requests.values()):
            return_free_memory()

    def _new_request(self, new: Any) -> LongRequest:
        params = new.sampling_params
        max_tokens = getattr(params, "max_tokens", None)
        prompt = new.prompt_embeds if new.prompt_token_ids is None else new.prompt_token_ids
        return LongRequest(
            id=new.req_id,
            num_prompt_tokens=len(prompt),
            max_tokens=self.max_model_len if max_tokens is None else max_tokens,
            trains_indexes=self._plans_indexes and asks_to_be_kept(params),
        )

    def _place(self, request_id: str, orders: StepOrders) -> None:
        """The request begins, or begins again after it was preempted."""
        request, placement = self.requests[request_id], orders.placed.get(request_id)
        request.placement = placement
        request.first_resident_token = 0
        request.lost_context_id = None
        if placement is None:
            self.readers.pop(request_id, None)
            request.sequence = request.context = None
            return
        request.first_resident_token = placement.first_resident_token
        if placement.context_id is not None:
            assert self.contexts is not None
            request.context = self.contexts.get(placement.context_id)
            request.sequence = self._new_sequence(request, placement.num_tokens)
            self.readers[request_id] = request
            if request.context is None:
                self.lose(request, placement.context_id, "is not there any more")

    def lose(self, request: LongRequest, context_id: str, reason: str) -> None:
        """A request cannot read its context: it has to begin again."""
        logger.warning(
            "context %s of request %s %s: its tokens are computed again",
            context_id, request.id, reason,
        )  # fmt: skip
        request.lost_context_id = context_id
        self._give_up(context_id, reason)

    def _give_up(self, context_id: str, problem: str) -> None:
        if self.contexts is not None:
            self.contexts.give_up(context_id, problem)

    def _new_sequence(self, request: LongRequest, begin: int) -> HostSequence:
        most_tokens = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
        policy = self.policy
        return HostSequence(
            SequencePlace(
                begin=begin,
                capacity=most_tokens - begin,
                sink_end=policy.sink_end,
                window_tokens=policy.window_tokens,
                # where nothing is searched, nothing is encoded ahead
                prompt_end=request.num_prompt_tokens if self._is_searched else 0,
            ),
            self.encoding,
        )

    @property
    def policy(self) -> WindowPolicy:
        """Of the layers."""
        assert self._spec is not None
        return self._spec.policy

    def mirrored_requests(self, seq_lens: np.ndarray) -> list[tuple[int, LongRequest]]:
        """The requests of the running step whose tokens are copied to the host, with their rows in
        its block table; none in a dummy run.

        Args:
            seq_lens: [requests], the tokens of the step included.
        """
        if self.batch is None:
            return []
        requests = [self.requests.get(each) for each in self.batch.req_ids[: len(seq_lens)]]
        num_prompt_tokens = [0 if each is None else each.num_prompt_tokens for each in requests]
        # short requests must not cost anything: there are many of them in every step
        are_mirrored = self.policy.mirrors(seq_lens[: len(requests)], np.array(num_prompt_tokens))
        found = ((number, requests[number]) for number in np.flatnonzero(are_mirrored).tolist())
        return [(number, request) for number, request in found if request is not None]

    def sequence_of(self, request: LongRequest) -> HostSequence:
        """Where the tokens of a step are copied to."""
        if request.sequence is None:
            request.sequence = self._new_sequence(request, 0)
        return request.sequence


def lost_in_any_rank(lost: dict[str, str]) -> dict[str, str]:
    """Requests whose context one of the tensor parallel ranks cannot read, with the ids of the
    contexts: each has a part of every context, and the scheduler hears the first one only. All
    ranks call it in the same step."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return lost
    num_lost = torch.tensor([len(lost)])
    torch.distributed.all_reduce(num_lost, group=group.cpu_group)
    if not num_lost.item():
        return lost
    parts: list[dict[str, str]] = [{}] * group.world_size
    torch.distributed.all_gather_object(parts, lost, group=group.cpu_group)
    return {request_id: each for part in parts for request_id, each in part.items()}


_ATTRIBUTE = "relay_long_context_worker"
"""Of a VllmConfig in the worker's process: each engine has one of its own, and several may be in
one process. It goes with its engine."""


def worker_of(vllm_config: VllmConfig) -> LongContextWorker | None:
    """What the worker of an engine knows of long requests; None: it has no layers of
    RELAY_SPARSE."""
    return getattr(vllm_config, _ATTRIBUTE, None)


def make_worker(vllm_config: VllmConfig) -> LongContextWorker:
    """That of an engine, made at the first call."""
    worker = worker_of(vllm_config)
    if worker is None:
        worker = LongContextWorker()
        setattr(vllm_config, _ATTRIBUTE, worker)
    return worker

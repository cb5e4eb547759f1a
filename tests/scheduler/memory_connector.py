# SPDX-License-Identifier: Apache-2.0
"""A KV connector that keeps every full block in memory, for `SimulatedExecutor`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

from tests.scheduler.simulated_engine import SimulatedExecutor


def transfer_config(**options: Any) -> dict[str, Any]:
    """Of an engine with the connector; for the options see there."""
    return {
        "kv_connector": MemoryConnector.__name__,
        "kv_connector_module_path": __name__,
        "kv_role": "kv_both",
        "kv_connector_extra_config": options,
    }


@dataclass
class Transfers(KVConnectorMetadata):
    """What a step loads and stores: ids of blocks, and the names under which they are kept."""

    loads: dict[str, list[tuple[int, bytes]]] = field(default_factory=dict)
    stores: list[tuple[int, bytes]] = field(default_factory=list)
    asynchronous: bool = False


class MemoryConnector(KVConnectorBase_V1):
    """The scheduler's side. Options of ``kv_connector_extra_config``:

    - asynchronous: loads end some steps after they began;
    - max_blocks: how many are kept;
    - answers_late: the first time it is asked about a request it does not know yet.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        options = self._kv_transfer_config.kv_connector_extra_config
        self._asynchronous = options.get("asynchronous", False)
        self._max_blocks = options.get("max_blocks", 1 << 30)
        self._answers_late = options.get("answers_late", False)
        self._block_size = vllm_config.cache_config.block_size
        self._manager: Any = None
        self._requests: dict[str, Any] = {}
        self._begins: dict[str, int] = {}
        self._loads: dict[str, list[tuple[int, bytes]]] = {}
        self.stored: OrderedDict[bytes, None] = OrderedDict()
        self.loaded_blocks = 0
        self.lookups = 0

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self._manager = kv_cache_manager

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self.lookups += 1
        if self._answers_late and request.request_id not in self._requests:
            self._requests[request.request_id] = request
            return None, False
        self._requests[request.request_id] = request
        begin = self._begins[request.request_id] = num_computed_tokens // self._block_size
        end = begin
        for name in request.block_hashes[begin : (request.num_tokens - 1) // self._block_size]:
            if name not in self.stored:
                break
            end += 1
        return (end - begin) * self._block_size, end > begin and self._asynchronous

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        begin = self._begins[request.request_id]
        end = begin + num_external_tokens // self._block_size
        if end > begin:
            (ids,) = blocks.get_block_ids()
            names = request.block_hashes[begin:end]
            self._loads[request.request_id] = list(zip(ids[begin:end], names, strict=True))
            self.loaded_blocks += end - begin

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Transfers:
        loads, self._loads = self._loads, {}
        stores = list(self._new_blocks(scheduler_output))
        self.stored.update((name, None) for _, name in stores)
        while len(self.stored) > self._max_blocks:
            self.stored.popitem(last=False)
        return Transfers(loads, stores, self._asynchronous)

    def _new_blocks(self, scheduler_output: SchedulerOutput) -> Iterator[tuple[int, bytes]]:
        """Those that the step fills."""
        cached = scheduler_output.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts |= {
            new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs
        }
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            request = self._requests[request_id]
            (ids,) = self._manager.get_blocks(request_id).get_block_ids()
            full = (starts[request_id] + count) // self._block_size
            for block_id, name in zip(ids[:full], request.block_hashes, strict=False):
                if name not in self.stored:
                    yield block_id, name

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, Any]:
        for kept in (self._requests, self._begins, self._loads):
            kept.pop(request.request_id, None)
        return False, None

    # the worker's side is ConnectedExecutor
    def start_load_kv(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...


class ConnectedExecutor(SimulatedExecutor):
    """Moves the KV memory of blocks as MemoryConnector says."""

    LOAD_STEPS = 3

    def initialize_from_config(self, kv_cache_configs: Any) -> Any:
        self._store: dict[bytes, Any] = {}
        self._loading: dict[str, tuple[int, list[tuple[int, bytes]]]] = {}
        return super().initialize_from_config(kv_cache_configs)

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        transfers = scheduler_output.kv_connector_metadata
        assert isinstance(transfers, Transfers)
        for request_id, blocks in transfers.loads.items():
            self._loading[request_id] = (self.LOAD_STEPS * transfers.asynchronous, blocks)
        done = self._load()
        result = super().execute_model(scheduler_output, non_block)
        (memory,) = self._memory
        for block_id, name in transfers.stores:
            self._store[name] = memory[block_id].copy()
        if transfers.asynchronous:
            self._output.kv_connector_output = KVConnectorOutput(finished_recving=done)
        return result

    def _load(self) -> set[str]:
        """Goes on with what is loaded; returns the requests that have all."""
        (memory,) = self._memory
        done = {request_id for request_id, (steps, _) in self._loading.items() if not steps}
        for request_id in done:
            for block_id, name in self._loading.pop(request_id)[1]:
                memory[block_id] = self._store[name]
        self._loading = {
            each: (steps - 1, blocks) for each, (steps, blocks) in self._loading.items()
        }
        return done

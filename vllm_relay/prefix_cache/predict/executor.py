# SPDX-License-Identifier: Apache-2.0
"""An executor for vLLM's engine core that has a model's layers and computes nothing."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.utils.network_utils import get_file_store_init_method
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor import Executor
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec


class StubExecutor(Executor):
    """Has the layers of the model, without their weights, and computes nothing; `available_bytes`
    are those of its KV cache."""

    def __init__(self, vllm_config: VllmConfig, *, available_bytes: int) -> None:
        self.sampler: Callable[[str], list[int]] = lambda request_id: []
        """Tokens that a scheduled request gets, by its id."""
        self.begun: dict[str, None] = {}
        """Ids of the requests in the order in which they first ran."""
        self.last_step = SchedulerOutput.make_empty()
        self._replies: dict[str, Any] = {
            "determine_available_memory": available_bytes,
            "get_supported_tasks": ("generate",),
        }
        super().__init__(vllm_config)

    def _init_executor(self) -> None:
        config = self.vllm_config
        with set_current_vllm_config(config):
            init_distributed_environment(1, 0, get_file_store_init_method(), 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
            with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
                initialize_model(vllm_config=config)
            current_platform.update_block_size_for_backend(config)
            layers = get_layers_from_vllm_config(config, AttentionLayerBase)
            backends = [layer.get_attn_backend() for layer in layers.values()]
            self._replies["get_supported_kv_cache_layouts"] = [
                layout.name for layout in get_supported_kv_cache_layouts(dict.fromkeys(backends))
            ]

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        with set_current_vllm_config(self.vllm_config):
            return [get_kv_cache_spec(self.vllm_config)]

    def compile_or_warm_up_model(self) -> None:
        pass

    def collective_rpc(
        self, method: str | Callable[..., Any], *args: Any, **kwargs: Any
    ) -> list[Any]:
        return [self._replies.get(method) if isinstance(method, str) else None]

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        self.last_step = scheduler_output
        self.begun.update((new.req_id, None) for new in scheduler_output.scheduled_new_reqs)
        request_ids = list(scheduler_output.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(request_ids)},
            sampled_token_ids=[self.sampler(request_id) for request_id in request_ids],
        )
        if not non_block:
            return output
        future: Future[ModelRunnerOutput] = Future()
        future.set_result(output)
        return future

    def check_health(self) -> None:
        pass

# SPDX-License-Identifier: Apache-2.0
"""What the sources alone do not tell the scan: whose objects names without annotations are, and
which bodies of vLLM's functions vllm-relay goes by."""

from __future__ import annotations

import re

_REQUEST = "vllm.v1.request.Request"
_CORE_REQUEST = "vllm.v1.engine.EngineCoreRequest"
_CONFIG = "vllm.config.VllmConfig"
_SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"
_ENGINES = ("vllm.v1.engine.llm_engine.LLMEngine", "vllm.v1.engine.async_llm.AsyncLLM")
_V1_RUNNER = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"
_V2_RUNNER = "vllm.v1.worker.gpu.model_runner.GPUModelRunner"
_PLATFORMS = ("vllm.platforms.cpu.CpuPlatform", "vllm.platforms.cuda.CudaPlatformBase")

NAMES: list[tuple[str, dict[str, str | tuple[str, ...]]]] = [
    # files (a pattern of their paths), and what names in them stand for where nothing else tells
    (
        r"",
        {
            "vllm_config": _CONFIG,
            "kv_cache_manager": "vllm.v1.core.kv_cache_manager.KVCacheManager",
            "scheduler_output": "vllm.v1.core.sched.output.SchedulerOutput",
            "model_runner_output": "vllm.v1.outputs.ModelRunnerOutput",
            "engine_core": "vllm.v1.engine.core.EngineCore",
            "platform_cls": _PLATFORMS,
            "scheduler_cls": _SCHEDULER,
            "selected_backend": "vllm.v1.attention.backends.registry.AttentionBackendEnum",
            "attn_selector_config": "vllm.v1.attention.selector.AttentionSelectorConfig",
            "selector_config": "vllm.v1.attention.selector.AttentionSelectorConfig",
            "sampling_params": "vllm.sampling_params.SamplingParams",
            "kv_cache_spec": "vllm.v1.kv_cache_interface.AttentionSpec",
            "online_renderer": "vllm.renderers.online_renderer.OnlineRenderer",
            "block_pool": "vllm.v1.core.block_pool.BlockPool",
            "engine_client": "vllm.engine.protocol.EngineClient",
            "llm": "vllm.entrypoints.llm.LLM",
        },
    ),
    (
        r"(scheduler|pins/table|pins/room|stats|admission|commands|block_hashes|catalog|vllm_changes/.*)\.py$",
        {"request": _REQUEST, "scheduler": _SCHEDULER},
    ),
    (r"(plan|predict/run)\.py$", {"request": _REQUEST}),
    (r"modules/engine/requests\.py$", {"request": _CORE_REQUEST}),
    (r"(system_prompts|preload|client|commands/.*)\.py$", {"engine": _ENGINES}),
    (r"client\.py$", {"renderer": "vllm.renderers.base.BaseRenderer"}),
    (
        r"serving/modular_requests\.py$",
        {"renderer": "vllm.renderers.online_renderer.OnlineRenderer"},
    ),
    (
        r"(modules/engine|long_context)/(worker|.*positions.*)\.py$",
        {
            "model_runner": (_V1_RUNNER, _V2_RUNNER),
            "runner": _V1_RUNNER,
            "batch": "vllm.v1.worker.gpu.input_batch.InputBatch",
            "new": "vllm.v1.core.sched.output.NewRequestData",
            "new_request": "vllm.v1.core.sched.output.NewRequestData",
        },
    ),
    (r"vllm_changes/", {"input_batch": "vllm.v1.worker.gpu.input_batch.InputBatch"}),
    (
        r"(modules|long_context|vllm_changes|attention_backends)/",
        {"worker": "vllm.v1.worker.gpu_worker.Worker"},
    ),
    (
        r"attention_backends/cuda/relay\w*\.py$",
        {"capability": "vllm.platforms.interface.DeviceCapability"},
    ),
]

OWN_CONSTRUCTION = {
    # classes of which vllm-relay alone makes objects, so that it knows what they are made of
    "vllm.v1.core.kv_cache_utils.FreeKVCacheBlockQueue.__init__",
    "vllm.v1.core.sched.request_queue.RequestQueue.__init__",
}

NARROWED: dict[str, tuple[str, ...]] = {
    # class: those that an object is known to be of where it is asked for what the class lacks
    "vllm.v1.kv_cache_interface.KVCacheSpec": ("vllm.v1.kv_cache_interface.FullAttentionSpec",),
    "vllm.v1.kv_cache_interface.AttentionSpec": ("vllm.v1.kv_cache_interface.FullAttentionSpec",),
    "vllm.v1.core.sched.interface.SchedulerInterface": (_SCHEDULER,),
    "vllm.v1.engine.core_client.EngineCoreClient": (
        "vllm.v1.engine.core_client.InprocClient",
        "vllm.v1.engine.core_client.SyncMPClient",
        "vllm.v1.engine.core_client.AsyncMPClient",
    ),
    "vllm.v1.attention.backend.AttentionLayer": (
        "vllm.model_executor.layers.attention.attention.Attention",
    ),
    _V1_RUNNER: (_V2_RUNNER,),
}

BODIES: dict[str, dict[str, str]] = {
    # function: {file of ours: what is used there of how it is done}; beside those that functions
    # of ours replace without calling them, which the scan finds
    "vllm.v1.engine.async_llm.AsyncLLM.shutdown": {
        "vllm_relay/vllm_changes/shutdown.py": "whom it tells that the engine is dead",
    },
    "vllm.v1.core.kv_cache_manager.KVCacheManager.get_computed_blocks": {
        "vllm_relay/prefix_cache/pins/table.py": "what it reads of a request",
        "vllm_relay/long_context/scheduling/scheduler.py": "how much of a prompt it looks up",
    },
    "vllm.v1.core.kv_cache_utils.get_request_block_hasher": {
        "vllm_relay/modules/prompt/block_hashes.py": "which tokens the hash of a block covers",
    },
    "vllm.v1.core.sched.scheduler.Scheduler.schedule": {
        "vllm_relay/scheduler/vllm_queue.py": "when it pops requests and gives them back",
        "vllm_relay/long_context/scheduling/scheduler.py": "what it makes of computed tokens "
        "without blocks",
    },
    "vllm.v1.core.sched.scheduler.Scheduler._preempt_request": {
        "vllm_relay/scheduler/vllm_scheduler.py": "which blocks it leaves in the prefix cache",
    },
    "vllm.v1.core.block_pool.BlockPool.touch": {
        "vllm_relay/prefix_cache/pins/table.py": "which references it counts",
        "vllm_relay/modules/engine/admission.py": "which references it counts",
    },
    "vllm.v1.core.block_pool.BlockPool.free_blocks": {
        "vllm_relay/prefix_cache/eviction/free_queue.py": "in which order blocks become free",
        "vllm_relay/prefix_cache/pins/table.py": "which references it counts",
    },
}


def hinted(file: str, name: str) -> tuple[str, ...]:
    """The classes whose instance, or which, a name in a file stands for; none if unknown."""
    for pattern, names in reversed(NAMES):
        if name in names and re.search(pattern, file):
            found = names[name]
            return (found,) if isinstance(found, str) else found
    return ()

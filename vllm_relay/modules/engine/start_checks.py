# SPDX-License-Identifier: Apache-2.0
"""Whether an engine can use modules, and the schemas of its configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vllm_relay.modules.markup.pml import read_schema

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_relay.config import RelayConfig


def check_schemas(vllm_config: VllmConfig, options: RelayConfig) -> None:
    """Refuse configured schemas that cannot be read, or that this engine could not use.

    Raises:
        ValueError: with the reason.
    """
    if not options.schemas:
        return
    if reason := unsupported_reason(vllm_config):
        raise ValueError(f"additional_config.relay.schemas: {reason}")
    for path in options.schemas:
        try:
            read_schema(Path(path))
        except OSError as error:
            raise ValueError(f"additional_config.relay.schemas: {path}: {error}") from None
        except ValueError as error:
            raise ValueError(f"additional_config.relay.schemas: {error}") from None


def unsupported_reason(vllm_config: VllmConfig) -> str | None:
    """Why this engine cannot use stored modules; None: it can."""
    from vllm.platforms import current_platform

    from vllm_relay.config import scheduler_is_selected
    from vllm_relay.limits import relay_is_selected, sparse_is_selected

    if not relay_is_selected(vllm_config) or sparse_is_selected(vllm_config):
        return "only the RELAY backend masks their padding: use --attention-backend relay"
    if not (current_platform.is_cpu() or current_platform.is_cuda()):
        return "their padding is masked on CPUs and NVIDIA GPUs only"
    if not scheduler_is_selected(vllm_config):
        return "only RelayScheduler waits for them: add additional_config.relay.scheduler=true"
    if not vllm_config.cache_config.enable_prefix_caching:
        return "they live in the prefix cache: leave --no-enable-prefix-caching out"
    if vllm_config.speculative_config is not None:
        return (
            "drafts of speculative decoding know nothing of their positions, and may be part of "
            "the names of blocks: remove --speculative-config"
        )
    if vllm_config.kv_transfer_config is not None:
        return "KV connectors know nothing of their blocks: remove --kv-transfer-config"
    return _model_reason(vllm_config)


def _model_reason(vllm_config: VllmConfig) -> str | None:
    model_config = vllm_config.model_config
    if model_config.uses_mrope or getattr(model_config, "uses_xdrope_dim", 0):
        return "positions of several dimensions (M-RoPE)"
    if model_config.is_hybrid or model_config.is_attention_free:
        return "state-space layers keep no keys and values of a module"
    if getattr(model_config, "uses_alibi", False):
        return "ALiBi takes distances from slots, not from positions"
    if model_config.attention_chunk_size is not None:
        return "layers with chunked local attention see nothing of modules in other chunks"
    if model_config.get_sliding_window() is not None:
        return "layers with a sliding window see nothing of modules further away"
    return None

# SPDX-License-Identifier: Apache-2.0
"""Which class serves RELAY and RELAY_SPARSE on CUDA: kernels, and the backend for prompts."""

from __future__ import annotations

from typing import Any

import torch
from vllm import envs
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.utils.import_utils import resolve_obj_by_qualname

from vllm_relay.attention_backends.cuda.config import faster_kernels
from vllm_relay.config import RelayConfig
from vllm_relay.limits import BACKEND_NAME, SPARSE_BACKEND_NAME, RelayUnsupportedError

logger = init_logger("vllm.relay")

_HERE = "vllm_relay.attention_backends"
_STOCK = "vllm.v1.attention.backends"
_FLASH = f"{_STOCK}.flash_attn.FlashAttentionBackend"
_FLASHINFER = f"{_STOCK}.flashinfer.FlashInferBackend"
_TRITON = f"{_STOCK}.triton_attn.TritonAttentionBackend"
STOCK_PATHS = {"Flash": _FLASH, "Triton": _TRITON}
NODES = {
    "flashinfer": (f"{_HERE}.cuda.flash.relay_flashinfer.RelayFlashInferBackend", _FLASHINFER),
    "flash": (f"{_HERE}.cuda.flash.relay.RelayNodesBackend", _FLASH),
}
"""By `cuda_kernels`: the class that calls them over shared prefixes, and the one it extends."""
_PROMPTS_TOO = f"{_HERE}.cuda.relay.RelayCudaBackend"
CHOICES = {
    name: [(f"{_HERE}.{module}{kind}Backend", path) for kind, path in STOCK_PATHS.items()]
    for name, module in (
        (BACKEND_NAME, "cuda.relay_stock.Relay"),
        (SPARSE_BACKEND_NAME, "sparse.cuda_stock.RelaySparse"),
    )
}
"""By backend, in order of preference: its class, and the one it leaves prompts to."""


def kernels_for(vllm_config: VllmConfig) -> str:
    """ "flash", "flashinfer", "auto" or "triton": what RELAY's layers are asked to be computed by;
    "auto" leaves it to each layer which of `NODES` serve it, if any do.

    Raises:
        RelayUnsupportedError: a way is asked for that does not serve this configuration.
    """
    options = RelayConfig.from_vllm_config(vllm_config)
    reasons = []
    if options.schemas:
        reasons.append("prompt modules (additional_config.relay.schemas)")
    if envs.VLLM_BATCH_INVARIANT:
        reasons.append("batch invariance (VLLM_BATCH_INVARIANT)")
    if options.cuda_kernels in NODES and reasons:
        raise RelayUnsupportedError(
            [
                f"{reason} with cuda_kernels={options.cuda_kernels}: leave it out"
                for reason in reasons
            ]
        )
    return "triton" if reasons else options.cuda_kernels


def path_for_layer(backend_name: str, selector_config: Any, capability: Any) -> str:
    """The first choice that serves a layer.

    Args:
        backend_name: RELAY or RELAY_SPARSE.
        selector_config: vLLM's AttentionSelectorConfig of the layer.
        capability: vLLM's DeviceCapability of the GPU.

    Raises:
        RelayUnsupportedError: with the reasons of each.
    """
    vllm_config = get_current_vllm_config_or_none()
    if selector_config.use_batch_invariant:
        # a stock backend's kernel would follow from how a step cuts a request
        if backend_name != BACKEND_NAME:
            raise RelayUnsupportedError(
                [f"batch invariance (VLLM_BATCH_INVARIANT) with {backend_name}: use {BACKEND_NAME}"]
            )
        if vllm_config is not None:
            kernels_for(vllm_config)  # refuses those of NODES
        logger.info_once("vllm-relay: prompts by relay, for batch invariance")
        return _PROMPTS_TOO
    choices = CHOICES[backend_name]
    kernels = kernels_for(vllm_config) if vllm_config and backend_name == BACKEND_NAME else "triton"
    if kernels in NODES:
        choices = [NODES[kernels]]
    elif kernels == "auto" and not _triton_is_faster(selector_config):
        # in vLLM's order
        names = ("flashinfer", "flash") if _prefers_flashinfer(capability) else ("flash",)
        choices = [*(NODES[name] for name in names), *choices]
    reasons: list[str] = []
    for path, stock_path in choices:
        has_nodes = (path, stock_path) in NODES.values()
        served = "shared prefixes and all else" if has_nodes else "prompts"
        served += f" by {stock_path.rsplit('.', 1)[1]}"
        asked = path if has_nodes else stock_path
        found = _reasons_against(asked, selector_config, capability, has_nodes=has_nodes)
        if not found:
            why = f"; not {', nor '.join(reasons)}" if reasons else ""
            logger.info_once("vllm-relay: %s%s", served, why)
            return path
        reasons.append(f"{served} ({', '.join(found)})")
    raise RelayUnsupportedError(reasons)


def _prefers_flashinfer(capability: Any) -> bool:
    """Whether vLLM takes FlashInfer before FlashAttention on such a GPU, and RELAY can, too."""
    return capability is not None and capability.major == 10


def _triton_is_faster(selector_config: Any) -> bool:
    """By what `vllm-relay tune` has measured."""
    if not torch.cuda.is_available():
        return False
    is_fp8 = (selector_config.kv_cache_dtype or "auto").startswith("fp8")
    faster = faster_kernels(
        torch.cuda.get_device_name(),
        head_size=selector_config.head_size,
        kv_bytes=1 if is_fp8 else selector_config.dtype.itemsize,
    )
    return faster == "triton"


def _reasons_against(
    path: str, selector_config: Any, capability: Any, *, has_nodes: bool
) -> list[str]:
    # FlashAttention wants queries in fp8 beside an fp8 cache, and those of the Triton kernels are
    # not quantized
    kv_cache_dtype = selector_config.kv_cache_dtype or "auto"
    if "FlashAttention" in path and kv_cache_dtype.startswith("fp8") and not has_nodes:
        return ["it would quantize queries"]
    try:
        backend = resolve_obj_by_qualname(path)
    except Exception as error:  # whatever is broken there, the next choice may do
        return [f"{type(error).__name__}: {error}"]
    return backend.validate_configuration(device_capability=capability, **selector_config._asdict())

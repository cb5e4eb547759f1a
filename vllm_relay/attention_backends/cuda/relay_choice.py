# SPDX-License-Identifier: Apache-2.0
"""Which of vLLM's own backends RELAY and RELAY_SPARSE leave prompts to on CUDA."""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.utils.import_utils import resolve_obj_by_qualname

from vllm_relay.limits import BACKEND_NAME, SPARSE_BACKEND_NAME, RelayUnsupportedError

logger = init_logger("vllm.relay")

_HERE = "vllm_relay.attention_backends"
_STOCK = "vllm.v1.attention.backends"
_FLASH = f"{_STOCK}.flash_attn.FlashAttentionBackend"
_TRITON = f"{_STOCK}.triton_attn.TritonAttentionBackend"
CHOICES = {
    BACKEND_NAME: (
        (f"{_HERE}.cuda.relay_flash.RelayFlashBackend", _FLASH),
        (f"{_HERE}.cuda.relay_triton.RelayTritonBackend", _TRITON),
    ),
    SPARSE_BACKEND_NAME: (
        (f"{_HERE}.sparse.cuda_flash.RelaySparseFlashBackend", _FLASH),
        (f"{_HERE}.sparse.cuda_triton.RelaySparseTritonBackend", _TRITON),
    ),
}
"""By backend, in order of preference: its class, and the one it leaves prompts to."""


def path_for_layer(backend_name: str, selector_config: Any, capability: Any) -> str:
    """The first choice that serves a layer.

    Args:
        backend_name: RELAY or RELAY_SPARSE.
        selector_config: vLLM's AttentionSelectorConfig of the layer.
        capability: vLLM's DeviceCapability of the GPU.

    Raises:
        RelayUnsupportedError: with the reasons of each.
    """
    reasons = []
    for path, stock_path in CHOICES[backend_name]:
        if not (found := _reasons_against(stock_path, selector_config, capability)):
            logger.info_once("vllm-relay: prompts by %s", stock_path.rsplit(".", 1)[1])
            return path
        reasons.append(f"prompts by {stock_path.rsplit('.', 1)[1]} ({', '.join(found)})")
    raise RelayUnsupportedError(reasons)


def _reasons_against(stock_path: str, selector_config: Any, capability: Any) -> list[str]:
    # FlashAttention wants queries in fp8 beside an fp8 cache, and relay's are not quantized
    kv_cache_dtype = selector_config.kv_cache_dtype or "auto"
    if "FlashAttention" in stock_path and kv_cache_dtype.startswith("fp8"):
        return ["it would quantize queries"]
    try:
        stock = resolve_obj_by_qualname(stock_path)
    except Exception as error:  # whatever is broken there, the next choice may do
        return [f"{type(error).__name__}: {error}"]
    return stock.validate_configuration(device_capability=capability, **selector_config._asdict())

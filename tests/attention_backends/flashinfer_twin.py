# SPDX-License-Identifier: Apache-2.0
"""FlashInfer in plain torch, as far as RELAY and vLLM's backend call its kernels of TensorRT-LLM,
and a GPU of compute capability 10.0 that vLLM's backend finds: what stands for both where there are
none."""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.utils import flashinfer as utils

from tests.attention_backends import flash_twin

BACKEND = "vllm.v1.attention.backends.flashinfer"
RELAY = "vllm_relay.attention_backends.cuda.flash.relay_flashinfer"
MODULES = ("flashinfer", "flashinfer.decode", "flashinfer.prefill", "flashinfer.utils")
IGNORED = {"workspace_buffer", "multi_ctas_kv_counter_buffer", "o_sf_scale", "kv_cache_sf"}
"""Arguments that say how, not what, and scales of what is not tested."""


def trtllm_batch_context_with_kv_cache(
    *,
    max_q_len: int,
    max_kv_len: int,
    batch_size: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    causal: bool = True,
    **given: Any,
) -> Any:
    """Whatever reads it, `cum_seq_lens_kv` counts blocks, as vLLM gives it."""
    block_size = given["kv_cache"][0].shape[2]
    blocks = -(-given["seq_lens"] // block_size)
    assert batch_size == len(blocks)
    assert cum_seq_lens_kv.diff().tolist() == blocks.tolist() and cum_seq_lens_kv[0] == 0
    return _attend(cum_seq_lens_q, max_q_len, max_kv_len, causal, **given)


def trtllm_batch_decode_with_kv_cache(
    *,
    max_seq_len: int,
    backend: str,
    q_len_per_req: int | None,
    max_q_len: int | None,
    cum_seq_lens_q: torch.Tensor | None,
    **given: Any,
) -> Any:
    """Query tokens are as many for each request, unless `cum_seq_lens_q` is given."""
    assert backend == "trtllm-gen"
    if cum_seq_lens_q is None:
        assert q_len_per_req is not None and max_q_len is None
        max_q_len, batch_size = q_len_per_req, len(given["query"]) // q_len_per_req
        cum_seq_lens_q = torch.arange(batch_size + 1) * q_len_per_req
    assert max_q_len is not None
    return _attend(cum_seq_lens_q, max_q_len, max_seq_len, True, **given)


def _attend(
    cum_seq_lens_q: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    causal: bool,
    *,
    query: torch.Tensor,
    kv_cache: tuple[torch.Tensor, torch.Tensor],
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    bmm1_scale: float,
    bmm2_scale: float,
    out: torch.Tensor,
    window_left: int = -1,
    sinks: torch.Tensor | None = None,
    kv_layout: str = "HND",
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    **how: Any,
) -> Any:
    """Keys and values, [num_blocks, kv heads, block_size, head_size]; lse, to base 2, may have any
    strides. Rows of no sequence are NaN, whatever they were."""
    assert how.keys() <= IGNORED and kv_layout == "HND", how
    assert sinks is None or sinks.dtype == torch.float32
    assert all(each.is_contiguous() for each in (query, block_tables, seq_lens))
    assert (window_left, causal) == (-1, False) or causal
    _, natural = flash_twin.flash_attn_varlen_func(
        q=query,
        k=kv_cache[0].transpose(1, 2),
        v=kv_cache[1].transpose(1, 2),
        max_seqlen_q=max_q_len,
        cu_seqlens_q=cum_seq_lens_q,
        max_seqlen_k=max_kv_len,
        seqused_k=seq_lens,
        block_table=block_tables,
        softmax_scale=bmm1_scale,
        causal=causal,
        window_size=None if window_left < 0 else [window_left, 0],
        return_softmax_lse=True,
        out=out,
        s_aux=sinks,
    )
    out *= bmm2_scale
    if lse is None:
        assert not return_lse
        return out
    assert lse.shape == query.shape[:2]
    lse.copy_(natural.t() / math.log(2))
    return (out, lse) if return_lse else out


class Gpu:
    """The platform, of another compute capability."""

    def __init__(self, capability: DeviceCapability) -> None:
        self.capability = capability

    def __getattr__(self, name: str) -> Any:
        return getattr(current_platform, name)

    def get_device_capability(self) -> DeviceCapability:
        return self.capability

    def is_device_capability(self, number: int) -> bool:
        return self.capability.to_int() == number

    def is_device_capability_family(self, number: int) -> bool:
        return self.capability.major == number // 10

    def has_device_capability(self, number: int) -> bool:
        return self.capability.to_int() >= number


def _absent(name: str) -> type:
    """What stands for something of FlashInfer that nobody calls here."""
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


def modules() -> tuple[Any, Any]:
    """vLLM's backend and RELAY's beside it, which take this module for FlashInfer."""
    if RELAY in sys.modules:
        return sys.modules[BACKEND], sys.modules[RELAY]
    stands_for = {name: ModuleType(name) for name in MODULES}
    for name, module in stands_for.items():
        vars(module).update(__spec__=ModuleSpec(name, None), __path__=[], __getattr__=_absent)
    vars(stands_for["flashinfer.decode"])["trtllm_batch_decode_with_kv_cache"] = (
        trtllm_batch_decode_with_kv_cache
    )
    vars(stands_for["flashinfer.prefill"])["trtllm_batch_context_with_kv_cache"] = (
        trtllm_batch_context_with_kv_cache
    )
    sys.modules.update(stands_for)
    try:
        return importlib.import_module(BACKEND), importlib.import_module(RELAY)
    finally:
        for name in MODULES:  # others would find that FlashInfer is there
            del sys.modules[name]


def _update(
    self: Any,
    layer: Any,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    caches = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
    flash_twin.reshape_and_cache_flash(key, value, *caches, slot_mapping)


def stand_in(set_attribute: Callable[..., None] = setattr) -> None:
    """Let vLLM's FlashInfer backend run as on a GPU of compute capability 10.0.

    Args:
        set_attribute: takes what `setattr` takes.
    """
    (module, relay), gpu = modules(), Gpu(DeviceCapability(10, 0))
    answer = inspect.unwrap(utils.supports_trtllm_attention)  # each time
    for patched in (utils, module, relay):
        set_attribute(patched, "supports_trtllm_attention", answer)
    for patched in (utils, module):
        set_attribute(patched, "current_platform", gpu)
    set_attribute(utils, "has_nvidia_artifactory", lambda: True)
    set_attribute(module, "_get_trtllm_workspace_buffer", lambda: torch.zeros(1, dtype=torch.uint8))
    set_attribute(module.FlashInferImpl, "do_kv_cache_update", _update)
    if hasattr(module, "_get_multi_ctas_kv_counter_buffer"):  # vLLM 0.33
        set_attribute(module, "_get_multi_ctas_kv_counter_buffer", lambda *given: None)
        set_attribute(module, "get_device_sm_count", lambda device: 1)
        set_attribute(module, "get_trtllm_gen_multi_ctas_kv_counter_bytes", lambda *given: 1)

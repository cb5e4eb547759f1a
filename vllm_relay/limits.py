# SPDX-License-Identifier: Apache-2.0
"""What the RELAY backend cannot serve, why, and the way out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from vllm.config import VllmConfig

BACKEND_NAME = "RELAY"
SPARSE_BACKEND_NAME = "RELAY_SPARSE"
BACKEND_NAMES = (BACKEND_NAME, SPARSE_BACKEND_NAME)
HEAD_SIZES = tuple(range(32, 257, 16))
BLOCK_SIZE_MULTIPLE_TOKENS = 32
CUDA_BLOCK_SIZE_MULTIPLE_TOKENS = 16
DTYPES = ("float32", "float16", "bfloat16")
KernelChoice = Literal[
    "auto",
    "amx_bf16",
    "avx512_bf16",
    "avx512",
    "avx2",
    "neon_bf16",
    "neon",
    "portable",
    "avx512_bf16_rounded",
]
KERNELS: tuple[str, ...] = get_args(KernelChoice)[1:]
"""In the order in which "auto" prefers them, but "avx512" comes before "avx512_bf16" where bf16
products are slow; it never takes those after the portable one."""

MIN_CAPABILITY, MIN_FP8_CAPABILITY = (8, 0), (8, 9)
FP8_KV_CACHE_DTYPES = ("fp8", "fp8_e4m3")

_OTHER_BACKEND = {
    "cpu": "use --attention-backend CPU_ATTN",
    "cuda": "use another --attention-backend",
}
_BLOCK_SIZE_MULTIPLES_TOKENS = {
    "cpu": BLOCK_SIZE_MULTIPLE_TOKENS,
    "cuda": CUDA_BLOCK_SIZE_MULTIPLE_TOKENS,
}


class RelayUnsupportedError(ValueError):
    """RELAY was selected for something it cannot compute exactly."""

    def __init__(self, reasons: list[str]) -> None:
        super().__init__("; ".join(f"relay cannot serve {reason}" for reason in reasons))


def relay_is_selected(vllm_config: VllmConfig) -> bool:
    """Whether any layer of this configuration is asked to run on RELAY or RELAY_SPARSE."""
    return not _selected_backends(vllm_config).isdisjoint(BACKEND_NAMES)


def sparse_is_selected(vllm_config: VllmConfig) -> bool:
    """Whether any layer of this configuration is asked to run on RELAY_SPARSE."""
    return SPARSE_BACKEND_NAME in _selected_backends(vllm_config)


def _selected_backends(vllm_config: VllmConfig) -> set[str | None]:
    attention_config = vllm_config.attention_config
    selected = [attention_config.backend, *attention_config.backend_per_kind.values()]
    speculative_config = vllm_config.speculative_config
    selected.append(getattr(speculative_config, "attention_backend", None))
    return {getattr(backend, "name", None) for backend in selected}


def check_config(vllm_config: VllmConfig, device_type: str) -> None:
    """Refuse a configuration that RELAY cannot serve, before any process is started.

    Layers are checked again, one by one, when the model is built: see :func:`check_layer`.

    Args:
        device_type: "cpu" or "cuda"; others are refused.

    Raises:
        RelayUnsupportedError: with every reason found and the way out of each.
    """
    if device_type not in _OTHER_BACKEND:
        raise RelayUnsupportedError(
            [
                f"{device_type} devices: its kernels are for CPUs and NVIDIA GPUs; use another "
                "--attention-backend"
            ]
        )
    model_config = vllm_config.model_config
    backend = vllm_config.attention_config.backend
    if model_config is not None and backend is not None and model_config.use_mla:
        raise RelayUnsupportedError([_mla_reason()])  # vLLM sets the rest to suit MLA
    other_backend = _OTHER_BACKEND[device_type]
    reasons = []
    cache_config = vllm_config.cache_config
    if reason := _kv_cache_dtype_reason(cache_config.cache_dtype, device_type):
        reasons.append(reason)
    if cache_config.user_specified_block_size and (
        reason := _block_size_reason(cache_config.block_size, device_type)
    ):
        reasons.append(reason)
    if vllm_config.kv_transfer_config is not None and device_type == "cpu":
        reasons.append(
            "KV connectors: relay keeps K and V in its own packing; "
            f"remove --kv-transfer-config or {other_backend}"
        )
    parallel_config = vllm_config.parallel_config
    if parallel_config.decode_context_parallel_size > 1:
        reasons.append(
            f"decode context parallelism: set --decode-context-parallel-size 1 or {other_backend}"
        )
    if parallel_config.use_ubatching:
        reasons.append(
            "micro-batches: they plan parts of a batch at once; remove --enable-dbo and "
            f"--ubatch-size or {other_backend}"
        )
    if (
        model_config is not None
        and getattr(backend, "name", None) in BACKEND_NAMES
        and not model_config.is_attention_free
        and (reason := _head_size_reason(model_config.get_head_size(), device_type))
    ):
        reasons.append(reason)
    if reasons:
        raise RelayUnsupportedError(reasons)


def check_sparse_config(
    vllm_config: VllmConfig, device_type: str, prefill: str | None = None
) -> None:
    """Refuse a configuration that RELAY can serve and RELAY_SPARSE cannot.

    Args:
        device_type: "cpu" or "cuda".
        prefill: the option, if it is given.

    Raises:
        RelayUnsupportedError: with every reason found and the way out of each.
    """
    reasons = []
    if device_type == "cuda" and prefill == "exact_offload":
        reasons.append(
            "prompts whose KV blocks leave a GPU while they are computed: leave out "
            "additional_config.relay.prefill, or set it to exact_resident"
        )
    if str(vllm_config.cache_config.cache_dtype).startswith("fp8"):
        reasons.append(
            "long contexts with fp8 KV caches: use kv_cache_dtype=auto, or --attention-backend "
            "relay"
        )
    if vllm_config.kv_transfer_config is not None:
        reasons.append(
            "long contexts with KV connectors: remove --kv-transfer-config, or use "
            "--attention-backend relay"
        )
    if vllm_config.speculative_config is not None:
        reasons.append(
            "drafts of speculative decoding over long contexts: remove --speculative-config, or "
            "use --attention-backend relay"
        )
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        reasons.append(
            "long contexts with pipeline parallelism: set --pipeline-parallel-size 1, or use "
            "--attention-backend relay"
        )
    if reasons:
        raise RelayUnsupportedError(reasons)


def check_sparse_layer(*, has_alibi: bool, logits_soft_cap: float | None, has_sinks: bool) -> None:
    """Refuse a layer with full attention whose tokens may not leave the device.

    Args:
        has_alibi, logits_soft_cap, has_sinks: of the layer; those with a sliding window stay on the
            device, and are not asked about.

    Raises:
        RelayUnsupportedError: with every reason found and the way out of each.
    """
    features = {
        "position biases (ALiBi)": has_alibi,
        f"scores with a soft cap of {logits_soft_cap}": bool(logits_soft_cap),
        "attention sinks of the model": has_sinks,
    }
    reasons = [
        f"long contexts of layers with {feature}: use --attention-backend relay"
        for feature, is_there in features.items()
        if is_there
    ]
    if reasons:
        raise RelayUnsupportedError(reasons)


def check_layer(selector_config: Any, device_type: str) -> None:
    """Refuse a layer that RELAY cannot serve.

    Args:
        selector_config: vLLM's AttentionSelectorConfig of the layer.
        device_type: "cpu" or "cuda".

    Raises:
        RelayUnsupportedError: with every reason found and the way out of each.
    """

    def asks_for(feature: str) -> bool:
        return bool(getattr(selector_config, feature, False))

    if asks_for("use_mla"):
        raise RelayUnsupportedError([_mla_reason()])  # vLLM sets the rest to suit MLA
    reasons = []
    if reason := _head_size_reason(selector_config.head_size, device_type):
        reasons.append(reason)
    if reason := _kv_cache_dtype_reason(selector_config.kv_cache_dtype, device_type):
        reasons.append(reason)
    if reason := _block_size_reason(selector_config.block_size, device_type):
        reasons.append(reason)
    dtype = str(selector_config.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        reasons.append(f"dtype {dtype}: use --dtype with one of {', '.join(DTYPES)}")
    attn_type = getattr(selector_config, "attn_type", "decoder")
    if reason := attn_type_reason(attn_type, device_type):
        reasons.append(reason)
    features = {
        "use_sparse": "sparse attention",
        "use_mm_prefix": "bidirectional attention over multimodal prefixes",
        "use_per_head_quant_scales": "quantization scales per head",
        "use_non_causal": "non-causal attention",
        "use_rswa": "reference sliding window attention",
        "use_dcp": "decode context parallelism",
        "use_pcp": "prefill context parallelism",
    }
    if device_type == "cpu":
        features["use_kv_connector"] = "KV connectors"
    else:
        features["use_adaptive_verification"] = "adaptive verification of drafts"
    other_backend = _OTHER_BACKEND[device_type]
    reasons += [f"{text}: {other_backend}" for name, text in features.items() if asks_for(name)]
    if reasons:
        raise RelayUnsupportedError(reasons)


def check_capability(capability: tuple[int, int], kv_cache_dtype: str | None) -> None:
    """Refuse an NVIDIA GPU whose instructions relay's kernels need and do not find.

    Args:
        capability: (9, 0) for sm_90.

    Raises:
        RelayUnsupportedError: with the reason.
    """
    number = ".".join(map(str, capability))
    if tuple(capability) < MIN_CAPABILITY:
        raise RelayUnsupportedError(
            [f"GPUs of compute capability {number}, only from 8.0 on: {_OTHER_BACKEND['cuda']}"]
        )
    if str(kv_cache_dtype).startswith("fp8") and tuple(capability) < MIN_FP8_CAPABILITY:
        raise RelayUnsupportedError(
            [
                f"fp8 KV caches on GPUs of compute capability {number}, only from 8.9 on: "
                "use kv_cache_dtype=auto"
            ]
        )


def attn_type_reason(attn_type: str, device_type: str = "cpu") -> str | None:
    """Why a layer of this vLLM AttentionType is refused, or None."""
    if attn_type == "decoder":
        return None
    name = getattr(attn_type, "value", attn_type)  # a str enum formats as its member's name
    return f"{name} attention, only causal decoder layers: {_OTHER_BACKEND[device_type]}"


def _kv_cache_dtype_reason(kv_cache_dtype: str | None, device_type: str) -> str | None:
    served = ("auto", *FP8_KV_CACHE_DTYPES)
    if kv_cache_dtype is None or kv_cache_dtype in served:
        return None
    return (
        "KV caches of another dtype than the model's or fp8 (e4m3): kv_cache_dtype="
        f"{kv_cache_dtype} was given; use kv_cache_dtype={', '.join(served)} or "
        f"{_OTHER_BACKEND[device_type].removeprefix('use ')}"
    )


def _block_size_reason(block_size_tokens: int | None, device_type: str) -> str | None:
    multiple_tokens = _BLOCK_SIZE_MULTIPLES_TOKENS[device_type]
    if block_size_tokens is None or block_size_tokens % multiple_tokens == 0:
        return None
    return (
        f"KV blocks of {block_size_tokens} tokens: use a --block-size that is a multiple of "
        f"{multiple_tokens}"
    )


def _head_size_reason(head_size: int, device_type: str) -> str | None:
    if head_size in HEAD_SIZES:
        return None
    return (
        f"heads of size {head_size}, only {HEAD_SIZES[0]} to {HEAD_SIZES[-1]} in steps of 16: "
        f"{_OTHER_BACKEND[device_type]}"
    )


def _mla_reason() -> str:
    return "multi-head latent attention (MLA): leave --attention-backend at auto for this model"

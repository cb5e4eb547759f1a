# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_relay.limits import (
    RelayUnsupportedError,
    check_capability,
    check_config,
    check_layer,
    check_sparse_config,
    relay_is_selected,
)

RELAY = SimpleNamespace(name="RELAY")
SPARSE = SimpleNamespace(name="RELAY_SPARSE")
CPU_ATTN = SimpleNamespace(name="CPU_ATTN")


def config(
    backend: Any = RELAY,
    cache: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """What limits.py reads of a VllmConfig."""
    cache_config = {"cache_dtype": "auto", "user_specified_block_size": False, "block_size": 128}
    model_config = {"use_mla": False, "is_attention_free": False, "head_size": 64} | (model or {})
    defaults = {
        "attention_config": SimpleNamespace(backend=backend, backend_per_kind={}),
        "cache_config": SimpleNamespace(**(cache_config | (cache or {}))),
        "model_config": SimpleNamespace(
            **model_config, get_head_size=lambda: model_config["head_size"]
        ),
        "parallel_config": SimpleNamespace(decode_context_parallel_size=1, use_ubatching=False),
        "kv_transfer_config": None,
        "speculative_config": None,
    }
    return SimpleNamespace(**(defaults | kwargs))


def layer(**kwargs: Any) -> Any:
    """What limits.py reads of an AttentionSelectorConfig."""
    defaults = {"head_size": 64, "dtype": "torch.bfloat16", "kv_cache_dtype": "auto"}
    return SimpleNamespace(**(defaults | {"block_size": None, "attn_type": "decoder"} | kwargs))


@pytest.mark.parametrize(
    ("vllm_config", "selected"),
    [
        (config(), True),
        (config(CPU_ATTN), False),
        (config(None), False),
        (
            config(
                attention_config=SimpleNamespace(
                    backend=None, backend_per_kind={"full_attention": RELAY}
                )
            ),
            True,
        ),
        (config(None, speculative_config=SimpleNamespace(attention_backend=RELAY)), True),
        (config(None, speculative_config=SimpleNamespace()), False),
    ],
    ids=["relay", "other", "auto", "per_kind", "draft_model", "draft_model_auto"],
)
def test_relay_is_selected(vllm_config: Any, selected: bool) -> None:
    assert relay_is_selected(vllm_config) is selected


def test_configurations_that_are_served() -> None:
    for vllm_config in (
        config(),
        config(model_config=None),
        config(cache={"cache_dtype": "fp8"}),
        config(cache={"cache_dtype": "fp8_e4m3"}),
        config(cache={"user_specified_block_size": True, "block_size": 32}),
        config(model={"is_attention_free": True, "head_size": 0}),
    ):
        check_config(vllm_config, "cpu")


@pytest.mark.parametrize(
    ("vllm_config", "message"),
    [
        (
            config(cache={"cache_dtype": "fp8_e5m2"}),
            "relay cannot serve KV caches of another dtype than the model's or fp8 (e4m3): "
            "kv_cache_dtype=fp8_e5m2 was given; use kv_cache_dtype=auto, fp8, fp8_e4m3 or "
            "--attention-backend CPU_ATTN",
        ),
        (
            config(cache={"cache_dtype": "nvfp4"}),
            "than the model's or fp8 (e4m3): kv_cache_dtype=nvfp4",
        ),
        (
            config(cache={"user_specified_block_size": True, "block_size": 48}),
            "KV blocks of 48 tokens: use a --block-size that is a multiple of 32",
        ),
        (config(model={"head_size": 512}), "relay cannot serve heads of size 512, only 32 to 256"),
        (config(model={"use_mla": True}), "relay cannot serve multi-head latent attention (MLA)"),
        (config(kv_transfer_config=object()), "remove --kv-transfer-config"),
        (
            config(
                parallel_config=SimpleNamespace(decode_context_parallel_size=2, use_ubatching=False)
            ),
            "set --decode-context-parallel-size 1",
        ),
    ],
    ids=["fp8_e5m2", "nvfp4", "block_size", "head_size", "mla", "kv_connector", "dcp"],
)
def test_configurations_that_are_refused(vllm_config: Any, message: str) -> None:
    with pytest.raises(RelayUnsupportedError, match=re.escape(message)):
        check_config(vllm_config, "cpu")


def test_other_devices_are_refused() -> None:
    for device_type in ("xpu", "rocm"):
        with pytest.raises(RelayUnsupportedError, match=f"cannot serve {device_type} devices"):
            check_config(config(), device_type)


def test_configurations_that_are_served_on_cuda() -> None:
    for vllm_config in (
        config(),
        config(cache={"cache_dtype": "fp8"}),
        config(cache={"user_specified_block_size": True, "block_size": 16}),
        config(kv_transfer_config=object()),
    ):
        check_config(vllm_config, "cuda")


@pytest.mark.parametrize(
    ("vllm_config", "message"),
    [
        (
            config(cache={"cache_dtype": "fp8_e5m2"}),
            "kv_cache_dtype=fp8_e5m2 was given; use kv_cache_dtype=auto, fp8, fp8_e4m3 or another "
            "--attention-backend",
        ),
        (
            config(cache={"user_specified_block_size": True, "block_size": 24}),
            "a --block-size that is a multiple of 16",
        ),
        (
            config(
                parallel_config=SimpleNamespace(decode_context_parallel_size=1, use_ubatching=True)
            ),
            "remove --enable-dbo and --ubatch-size",
        ),
    ],
    ids=["fp8_e5m2", "block_size", "ubatches"],
)
def test_configurations_that_are_refused_on_cuda(vllm_config: Any, message: str) -> None:
    with pytest.raises(RelayUnsupportedError, match=re.escape(message)):
        check_config(vllm_config, "cuda")


def test_gpus_whose_instructions_are_missing_are_refused() -> None:
    check_capability((8, 0), "auto")
    check_capability((8, 9), "fp8")
    with pytest.raises(RelayUnsupportedError, match="compute capability 7.5, only from 8.0 on"):
        check_capability((7, 5), None)
    with pytest.raises(RelayUnsupportedError, match="fp8 KV caches on .* 8.6, only from 8.9 on"):
        check_capability((8, 6), "fp8_e4m3")


def test_layers_on_cuda() -> None:
    check_layer(layer(kv_cache_dtype="fp8", block_size=16, use_kv_connector=True), "cuda")
    with pytest.raises(RelayUnsupportedError, match="use another --attention-backend"):
        check_layer(layer(head_size=320), "cuda")
    check_layer(layer(use_batch_invariant=True), "cuda")
    check_layer(layer(use_adaptive_verification=True), "cpu")
    with pytest.raises(RelayUnsupportedError, match="adaptive verification"):
        check_layer(layer(use_adaptive_verification=True), "cuda")


def test_every_reason_is_given() -> None:
    vllm_config = config(cache={"cache_dtype": "nvfp4"}, model={"head_size": 512})
    with pytest.raises(RelayUnsupportedError, match=r"nvfp4 was given; .*relay cannot serve heads"):
        check_config(vllm_config, "cpu")


@pytest.mark.parametrize("head_size", [32, 80, 112, 256])
def test_layers_that_are_served(head_size: int) -> None:
    check_layer(
        layer(head_size=head_size, has_sink=True, has_sliding_window=True, new_in_033=True), "cpu"
    )


@pytest.mark.parametrize(
    ("selector_config", "message"),
    [
        (layer(use_mla=True, head_size=576), "multi-head latent attention (MLA)"),
        (layer(head_size=24), "heads of size 24"),
        (layer(kv_cache_dtype="fp8_e5m2"), "kv_cache_dtype=fp8_e5m2 was given"),
        (layer(block_size=16), "KV blocks of 16 tokens"),
        (layer(dtype="torch.float64"), "dtype float64: use --dtype with one of float32"),
        (layer(attn_type="encoder_only"), "encoder_only attention, only causal decoder layers"),
        (layer(use_sparse=True), "sparse attention"),
        (layer(use_mm_prefix=True), "bidirectional attention over multimodal prefixes"),
        (layer(use_non_causal=True), "non-causal attention"),
        (layer(use_rswa=True), "reference sliding window attention"),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else "",
)
def test_layers_that_are_refused(selector_config: Any, message: str) -> None:
    with pytest.raises(RelayUnsupportedError, match=re.escape(message)):
        check_layer(selector_config, "cpu")


def sparse_config(**kwargs: Any) -> Any:
    parallel = SimpleNamespace(decode_context_parallel_size=1, pipeline_parallel_size=1)
    return config(SPARSE, **({"parallel_config": parallel} | kwargs))


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_long_contexts_are_served(device_type: str) -> None:
    for prefill in (None, "exact_resident"):
        check_sparse_config(sparse_config(), device_type, prefill)
    check_sparse_config(sparse_config(), "cpu", "exact_offload")


@pytest.mark.parametrize(
    ("vllm_config", "prefill", "message"),
    [
        (sparse_config(), "exact_offload", "leave out additional_config.relay.prefill"),
        (sparse_config(cache={"cache_dtype": "fp8_e4m3"}), None, "use kv_cache_dtype=auto"),
        (sparse_config(kv_transfer_config=object()), None, "remove --kv-transfer-config"),
        (sparse_config(speculative_config=object()), None, "remove --speculative-config"),
        (
            sparse_config(parallel_config=SimpleNamespace(pipeline_parallel_size=2)),
            None,
            "set --pipeline-parallel-size 1",
        ),
    ],
    ids=["exact_offload", "fp8", "kv_connector", "drafts", "pipeline"],
)
def test_long_contexts_that_are_refused_on_cuda(
    vllm_config: Any, prefill: str | None, message: str
) -> None:
    with pytest.raises(RelayUnsupportedError, match=re.escape(message)):
        check_sparse_config(vllm_config, "cuda", prefill)

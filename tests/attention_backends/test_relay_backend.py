# SPDX-License-Identifier: Apache-2.0
"""The RELAY backend's classes as vLLM drives them, against the reference."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_relay.attention_backends import reference
from vllm_relay.attention_backends.cpu import relay
from vllm_relay.attention_backends.step_stats import recorder
from vllm_relay.limits import RelayUnsupportedError

pytestmark = pytest.mark.skipif(
    not current_platform.is_cpu(), reason="relay's kernels are for CPUs"
)

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 4, 2, 48, 32
NUM_BLOCKS = 16
BLOCK_TABLE = [[1, 2, 3, 0], [1, 2, 4, 0], [1, 5, 6, 7], [8, 0, 0, 0]]
SEQ_LENS = [70, 96, 100, 5]
QUERY_LENS = [1, 33, 2, 5]
NUM_TOKENS = sum(QUERY_LENS)
PADDING_ROWS, PADDING_TOKENS = 2, 3


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> relay.RelayMetadataBuilder:
    return make_builder(monkeypatch)


def make_builder(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    **options: Any,
) -> relay.RelayMetadataBuilder:
    monkeypatch.setattr(relay, "get_num_attention_heads_from_layers", lambda *args: NUM_HEADS)
    vllm_config: Any = VllmConfig(
        device_config=DeviceConfig(device="cpu"), additional_config={"relay": options}
    )
    vllm_config.model_config = SimpleNamespace(dtype=dtype)
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE,
        num_kv_heads=NUM_KV_HEADS,
        head_size=HEAD_SIZE,
        dtype=kv_dtype or dtype,
    )
    return relay.RelayMetadataBuilder(spec, ["layer"], vllm_config, torch.device("cpu"))


def make_impl(**kwargs: Any) -> relay.RelayImpl:
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
        return relay.RelayImpl(
            NUM_HEADS, HEAD_SIZE, scale=HEAD_SIZE**-0.5, num_kv_heads=NUM_KV_HEADS, **kwargs
        )


def step(causal: Any = True, padding_rows: int = PADDING_ROWS) -> CommonAttentionMetadata:
    """Four requests; rows that pad the batch hold what an earlier step left there."""
    ends = torch.tensor([0, *QUERY_LENS]).cumsum(0).tolist()
    query_start_loc = torch.tensor(ends + [NUM_TOKENS] * padding_rows, dtype=torch.int32)
    slots = [
        row[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        for row, seq_len, query_len in zip(BLOCK_TABLE, SEQ_LENS, QUERY_LENS, strict=True)
        for position in range(seq_len - query_len, seq_len)
    ]
    return CommonAttentionMetadata(
        query_start_loc=query_start_loc,
        query_start_loc_cpu=query_start_loc,
        seq_lens=torch.tensor(SEQ_LENS + [999] * padding_rows, dtype=torch.int32),
        num_reqs=len(SEQ_LENS) + padding_rows,
        num_actual_tokens=NUM_TOKENS + PADDING_TOKENS,
        max_query_len=max(QUERY_LENS),
        max_seq_len=max(SEQ_LENS),
        block_table_tensor=torch.tensor(
            BLOCK_TABLE + [[1, 2, 3, 4]] * padding_rows, dtype=torch.int32
        ),
        slot_mapping=torch.tensor(slots + [-1] * PADDING_TOKENS),
        causal=causal,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "features",
    [
        {},
        {"sliding_window": 40},
        {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
        {"logits_soft_cap": 2.0},
        {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.bfloat16)},
    ],
    ids=lambda features: next(iter(features), "plain"),
)
def test_step_is_that_of_the_reference(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, features: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    builder, impl, common = make_builder(monkeypatch, dtype), make_impl(**features), step()
    metadata = builder.build(0, common)
    kv_cache = torch.empty(NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE, dtype=dtype)
    earlier = torch.randn(NUM_BLOCKS * BLOCK_SIZE, 2 * NUM_KV_HEADS, HEAD_SIZE).to(dtype)
    slots = torch.arange(NUM_BLOCKS * BLOCK_SIZE)
    reference.write_kv_cache(earlier[:, :2].contiguous(), earlier[:, 2:], kv_cache, slots)
    expected_cache = kv_cache.clone()

    # as in a model, query, key and value are views of one tensor, padded at the end
    qkv = torch.randn(common.num_actual_tokens, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_SIZE)
    query, key, value = (
        part.unflatten(1, (-1, HEAD_SIZE))
        for part in qkv.to(dtype).split([n * HEAD_SIZE for n in (4, 2, 2)], dim=1)
    )
    impl.do_kv_cache_update(None, key, value, kv_cache, common.slot_mapping)
    reference.write_kv_cache(key, value, expected_cache, common.slot_mapping)
    assert torch.equal(kv_cache, expected_cache)

    output = torch.full((common.num_actual_tokens, NUM_HEADS, HEAD_SIZE), 7.0, dtype=dtype)
    assert impl.forward(None, query, key, value, kv_cache, metadata, output) is output
    if (slopes := features.get("alibi_slopes")) is not None:
        features = {"alibi_slopes": torch.tensor(slopes)}
    expected, _ = reference.relay_attention(
        query[:NUM_TOKENS],
        expected_cache,
        common.block_table_tensor[:4],
        common.query_start_loc[:5],
        common.seq_lens[:4],
        scale=HEAD_SIZE**-0.5,
        num_kv_heads=NUM_KV_HEADS,
        output_dtype=torch.float64,
        **features,
    )
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(output[:NUM_TOKENS].double(), expected, atol=tolerance, rtol=0)
    assert (output[NUM_TOKENS:] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_step_over_fp8_is_that_of_the_reference(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """vLLM allocates bytes, and layers have scales."""
    torch.manual_seed(0)
    builder, impl, common = make_builder(monkeypatch, dtype, torch.uint8), make_impl(), step()
    layer: Any = SimpleNamespace(_k_scale_float=0.25, _v_scale_float=2.0)
    kv_cache = torch.zeros(NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE, dtype=torch.uint8)
    key, value = torch.randn(2, NUM_BLOCKS * BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE).to(dtype)
    impl.do_kv_cache_update(layer, key, value, kv_cache, torch.arange(NUM_BLOCKS * BLOCK_SIZE))
    stored = [
        ((numbers.float() / scale).to(torch.float8_e4m3fn).float() * scale)
        .view(NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE)
        .transpose(1, 2)
        for numbers, scale in ((key, 0.25), (value, 2.0))
    ]
    query = torch.randn(common.num_actual_tokens, NUM_HEADS, HEAD_SIZE).to(dtype)
    output = torch.full_like(query, 7.0)
    metadata = builder.build(0, common)
    assert impl.forward(layer, query, key, value, kv_cache, metadata, output) is output
    expected, _ = reference.relay_attention(
        query[:NUM_TOKENS].float(),
        reference.pack_kv_cache(*stored),
        common.block_table_tensor[:4],
        common.query_start_loc[:5],
        common.seq_lens[:4],
        scale=HEAD_SIZE**-0.5,
        num_kv_heads=NUM_KV_HEADS,
        output_dtype=torch.float64,
    )
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(output[:NUM_TOKENS].double(), expected, atol=tolerance, rtol=0)
    assert (output[NUM_TOKENS:] == 7).all()


def test_step_is_planned_once_and_counted(builder: relay.RelayMetadataBuilder) -> None:
    recorder.begin_step()
    metadata = builder.build(0, step())
    assert metadata.num_tokens == NUM_TOKENS
    assert metadata.block_table.tolist() == BLOCK_TABLE
    stats = recorder.take_step()
    assert stats is not None
    assert (stats.steps, stats.request_steps) == (1, 4)
    assert stats.kv_tokens_logical == sum(SEQ_LENS)


@pytest.mark.parametrize(("options", "shared"), [({}, 3), ({"min_shared_tokens": 64}, 2),
                                                 ({"sharing": False}, 0)])  # fmt: skip
def test_options_decide_what_is_shared(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], shared: int
) -> None:
    builder = make_builder(monkeypatch, kernel="portable", **options)
    builder.kernel = "avx512_bf16"  # for its costs: short ranges pay
    assert builder.build(0, step()).plan.stats.requests_shared == shared


def test_batch_without_padding(builder: relay.RelayMetadataBuilder) -> None:
    assert builder.build(0, step(padding_rows=0)).block_table.shape == (4, 4)


@pytest.mark.parametrize("causal", [False, torch.tensor([True, False])], ids=["no", "dynamic"])
def test_non_causal_steps_are_refused(builder: relay.RelayMetadataBuilder, causal: Any) -> None:
    with pytest.raises(RelayUnsupportedError, match="non-causal attention"):
        builder.build(0, step(causal))


def test_profiling_runs_leave_zeros() -> None:
    output = torch.ones(3, NUM_HEADS, HEAD_SIZE)
    empty = torch.tensor([])
    result = make_impl().forward(None, output, empty, empty, empty, None, output)
    assert result is output
    assert not output.any()


@pytest.mark.parametrize("attn_type", [kind for kind in AttentionType if kind != "decoder"])
def test_other_kinds_of_attention_are_refused(attn_type: AttentionType) -> None:
    with pytest.raises(RelayUnsupportedError, match=f"cannot serve {attn_type.value} attention"):
        make_impl(attn_type=attn_type)


def test_sinks_of_the_wrong_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sinks have shape \(3,\), expected \[4\]"):
        make_impl(sinks=torch.zeros(3))


def test_what_the_backend_offers() -> None:
    backend = relay.RelayBackend
    assert backend.get_name() == "RELAY"
    assert backend.supports_head_size(112) and not backend.supports_head_size(40)
    assert backend.supports_block_size(96) and not backend.supports_block_size(16)
    assert backend.supports_kv_cache_dtype("fp8") and backend.supports_kv_cache_dtype("fp8_e4m3")
    assert not backend.supports_kv_cache_dtype("fp8_e5m2")
    assert not backend.forward_includes_kv_cache_update
    assert backend.get_builder_cls()._cudagraph_support.name == "NEVER"


def test_a_slow_kernel_is_warned_of_unless_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warnings: list[str] = []
    logger = mock.Mock(warning_once=lambda text, *values: warnings.append(text % values))
    # not its method: where the plug-in is registered, each configuration sets vLLM's anew
    monkeypatch.setattr(relay, "logger", logger)
    monkeypatch.setattr(relay._C, "supported_kernels", lambda: ["avx2", "portable"])
    make_builder(monkeypatch)
    make_builder(monkeypatch, kernel="portable")
    assert not warnings
    monkeypatch.setattr(relay._C, "supported_kernels", lambda: ["portable"])
    make_builder(monkeypatch)
    (warning,) = warnings
    assert "only the portable one runs here" in warning and "CPU_ATTN" in warning

# SPDX-License-Identifier: Apache-2.0
"""The RELAY backend for CUDA as vLLM drives it, its kernels in Triton's interpreter, beside a stock
backend that computes prompts with the reference."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import DeviceConfig, VllmConfig
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tests.attention_backends.stock_cuda import StockBuilder, StockImpl, attend
from tests.attention_backends.told_blocks import tell
from vllm_relay.attention_backends.cuda import relay as relay_cuda
from vllm_relay.attention_backends.cuda import relay_stock
from vllm_relay.attention_backends.cuda.step_batch import StepBatch
from vllm_relay.attention_backends.relay_base import RelayImplBase
from vllm_relay.attention_backends.step_stats import recorder
from vllm_relay.attention_backends.worker_blocks import WorkerBlocks
from vllm_relay.limits import RelayUnsupportedError

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE, NUM_BLOCKS = 4, 2, 32, 32, 16
DECODES = [([1, 2, 3, 0], 70), ([1, 2, 4, 0], 96), ([1, 5, 6, 7], 100), ([1, 2, 11, 0], 66)]
PROMPTS = [([1, 2, 8, 0], 90, 20), ([9, 10, 0, 0], 40, 40)]
ONE = torch.ones(1)
LAYER: Any = SimpleNamespace(_k_scale=ONE, _v_scale=ONE)


class Builder(relay_cuda.RelayCudaMetadataBuilder):
    stock_builder_cls = StockBuilder


class Impl(relay_cuda.RelayCudaImpl):
    stock_impl_cls = StockImpl


def make_builder(
    cls: Any, monkeypatch: pytest.MonkeyPatch, spec: dict[str, Any] | None = None, **options: Any
) -> Any:
    monkeypatch.setattr(relay_cuda, "get_num_attention_heads_from_layers", lambda *args: NUM_HEADS)
    monkeypatch.setattr(relay_cuda, "get_layers_from_vllm_config", lambda *args: {})
    blocks = WorkerBlocks()
    monkeypatch.setattr(relay_cuda, "follow_blocks", lambda vllm_config: blocks)
    vllm_config = VllmConfig(
        device_config=DeviceConfig(device="cpu"), additional_config={"relay": options}
    )
    vllm_config.model_config = SimpleNamespace(max_model_len=128)
    vllm_config.scheduler_config.max_num_seqs = 8
    vllm_config.scheduler_config.max_num_batched_tokens = 128
    vllm_config.compilation_config.cudagraph_capture_sizes = [1, 8]
    kv_cache_spec = FullAttentionSpec(
        **{
            "block_size": BLOCK_SIZE,
            "num_kv_heads": NUM_KV_HEADS,
            "head_size": HEAD_SIZE,
            "dtype": torch.float32,
            **(spec or {}),
        }
    )
    return cls(kv_cache_spec, ["layer"], vllm_config, torch.device("cpu"))


def begin(builder: Any, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """All requests of a step are new, and the worker is told of them."""
    real = common.query_start_loc.diff() > 0
    table, lens = common.block_table_tensor[real], common.seq_lens[real]
    tell(builder.worker_blocks, table.numpy(), lens.numpy(), BLOCK_SIZE)
    return common


def step(requests: list[Any], padding_rows: int = 0) -> CommonAttentionMetadata:
    rows = [row for row, *_ in requests]
    seq_lens = [seq_len for _, seq_len, *_ in requests]
    query_lens = [request[2] if len(request) > 2 else 1 for request in requests]
    ends = torch.tensor([0, *query_lens]).cumsum(0).tolist()
    query_start_loc = torch.tensor(ends + ends[-1:] * padding_rows, dtype=torch.int32)
    slots = [
        row[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        for row, seq_len, query_len in zip(rows, seq_lens, query_lens, strict=True)
        for position in range(seq_len - query_len, seq_len)
    ]
    return CommonAttentionMetadata(
        query_start_loc=query_start_loc,
        query_start_loc_cpu=query_start_loc,
        seq_lens=torch.tensor(seq_lens + [0] * padding_rows, dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.tensor(seq_lens + [0] * padding_rows, dtype=torch.int32),
        num_reqs=len(requests) + padding_rows,
        num_actual_tokens=ends[-1] + padding_rows,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=torch.tensor(rows + [[0] * 4] * padding_rows, dtype=torch.int32),
        slot_mapping=torch.tensor(slots + [-1] * padding_rows),
        is_prefilling=torch.tensor([query_len > 1 for query_len in query_lens]),
    )


def run(builder: Any, impl: Any, common: CommonAttentionMetadata, seed: int = 0) -> Any:
    """What a layer returns for a step, and what it should."""
    torch.manual_seed(seed)
    kv_cache = torch.randn(NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, 2 * HEAD_SIZE).transpose(1, 2)
    num_tokens = common.num_actual_tokens
    query = torch.randn(num_tokens, NUM_HEADS, HEAD_SIZE)
    key, value = torch.randn(2, num_tokens, NUM_KV_HEADS, HEAD_SIZE)
    metadata = builder.build(0, begin(builder, common))
    impl.do_kv_cache_update(LAYER, key, value, kv_cache, common.slot_mapping)
    output = torch.full_like(query, 7.0)
    assert impl.forward(LAYER, query, key, value, kv_cache, metadata, output) is output
    expected = torch.full_like(query, 7.0)
    real = int(common.query_start_loc[-1])
    attend(query[:real], kv_cache, common, expected[:real], scale=impl.scale)
    return output, expected


@pytest.mark.parametrize("classes", [(Builder, Impl), (None, None)], ids=["stock", "relay only"])
@pytest.mark.parametrize(
    "requests",
    [DECODES, PROMPTS, DECODES + PROMPTS, DECODES[:1]],
    ids=["decodes", "prompts", "both", "one"],
)
def test_step_is_that_of_the_reference(
    monkeypatch: pytest.MonkeyPatch, classes: Any, requests: list[Any]
) -> None:
    builder_cls, impl_cls = classes
    builder = make_builder(builder_cls or relay_cuda.RelayCudaMetadataBuilder, monkeypatch)
    impl = (impl_cls or relay_cuda.RelayCudaImpl)(NUM_HEADS, HEAD_SIZE, 0.2, NUM_KV_HEADS)
    output, expected = run(builder, impl, step(requests))
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


def test_one_captured_step_serves_other_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A FULL CUDA graph launches with the metadata it was captured with; only buffers change."""
    builder = make_builder(Builder, monkeypatch)
    impl = Impl(NUM_HEADS, HEAD_SIZE, 0.2, NUM_KV_HEADS)
    common = step(DECODES[:1], padding_rows=4)
    captured = builder.build_for_cudagraph_capture(common)
    for seed, requests in enumerate((DECODES, DECODES[1:], DECODES[:1], DECODES[::-1])):
        torch.manual_seed(seed)
        kv_cache = torch.randn(NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)
        query = torch.randn(5, NUM_HEADS, HEAD_SIZE)
        now = step(requests, padding_rows=5 - len(requests))
        # vLLM's own tensors stay where they are as well
        common.block_table_tensor.copy_(now.block_table_tensor)
        common.query_start_loc.copy_(now.query_start_loc)
        common.seq_lens.copy_(now.seq_lens)
        common.seq_lens_cpu_upper_bound.copy_(now.seq_lens)
        builder.build(0, begin(builder, common))
        output = torch.full_like(query, 7.0)
        impl.forward(LAYER, query, None, None, kv_cache, captured, output)
        expected = torch.full_like(query, 7.0)
        attend(query[: len(requests)], kv_cache, now, expected[: len(requests)], scale=0.2)
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


def test_statistics_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = make_builder(Builder, monkeypatch)
    recorder.begin_step()
    builder.build(0, begin(builder, step(DECODES)))
    stats = recorder.take_step()
    assert stats is not None
    assert (stats.steps, stats.request_steps, stats.request_steps_shared) == (1, 4, 3)
    assert stats.kv_tokens_logical == 332
    assert stats.kv_tokens_read == 332 - 2 * 64  # blocks 1 and 2, of three requests
    assert (stats.groups, stats.forest_depth) == (1, 1)


def test_sharing_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = make_builder(Builder, monkeypatch, sharing=False)
    recorder.begin_step()
    builder.build(0, begin(builder, step(DECODES)))
    stats = recorder.take_step()
    assert stats is not None and stats.request_steps == 4 and stats.request_steps_shared == 0


@pytest.mark.parametrize(("tokens", "shared"), [(64, 3), (65, 0)])
def test_shorter_prefixes_than_asked_for_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, tokens: int, shared: int
) -> None:
    builder = make_builder(Builder, monkeypatch, min_shared_tokens=tokens)
    recorder.begin_step()
    builder.build(0, begin(builder, step(DECODES)))
    stats = recorder.take_step()
    assert stats is not None and stats.request_steps_shared == shared


def assert_decodes_right(builder: Any, impl: Any, common: Any, seed: int) -> None:
    torch.manual_seed(seed)
    kv_cache = torch.randn(NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)
    query = torch.randn(4, NUM_HEADS, HEAD_SIZE)
    output, expected = torch.empty_like(query), torch.empty_like(query)
    impl.forward(LAYER, query, None, None, kv_cache, builder.build(0, common), output)
    attend(query, kv_cache, common, expected, scale=0.2)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


def test_a_plan_serves_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests grow; a plan is made anew where one of them outgrows it, and for other requests."""
    builder = make_builder(Builder, monkeypatch)
    impl = Impl(NUM_HEADS, HEAD_SIZE, 0.2, NUM_KV_HEADS)
    made: list[int] = []
    plan_step = builder.planner.plan_step

    def counted(forest: Any, *args: Any, **keywords: Any) -> Any:
        made.append(len(forest.nodes))
        return plan_step(forest, *args, **keywords)

    monkeypatch.setattr(builder.planner, "plan_step", counted)
    begin(builder, step([(row, 128) for row, _ in DECODES]))
    for grown in range(24):
        common = step([(row, min(seq_len, 100) + grown) for row, seq_len in DECODES])
        assert_decodes_right(builder, impl, common, seed=grown)
    assert 1 <= len(made) <= 2 and made[0] == 1
    builder.build(0, begin(builder, step(DECODES[::-1])))
    assert len(made) <= 3


def test_requests_that_outgrow_a_plan_share_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = make_builder(Builder, monkeypatch)
    impl = Impl(NUM_HEADS, HEAD_SIZE, 0.2, NUM_KV_HEADS)
    found: list[Any] = []
    groups = StepBatch.groups
    monkeypatch.setattr(
        StepBatch,
        "groups",
        lambda *args, **keywords: found.append(groups(*args, **keywords)) or found[-1],
    )
    begin(builder, step([(row, 128) for row, _ in DECODES]))
    held = []
    for seq_len in (40, 64, 65, 100):
        common = step([(row, seq_len) for row, _ in DECODES])
        assert_decodes_right(builder, impl, common, seed=seq_len)
        held.append(builder.planner.held)
    assert held[0] is held[1] is not held[2] is held[3]
    assert len(found) == 1


def test_plans_of_drafts_and_of_their_verification_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps of three query tokens and of one in turn, of the same requests."""
    builder = make_builder(Builder, monkeypatch)
    builder.max_query_len = 3
    impl = Impl(NUM_HEADS, HEAD_SIZE, 0.2, NUM_KV_HEADS)
    made: list[Any] = []
    planned = builder.plans._planned
    monkeypatch.setattr(
        builder.plans, "_planned", lambda *args: made.append(args) or planned(*args)
    )
    begin(builder, step([(row, 128) for row, _ in DECODES[:2]]))
    for turn in range(3):
        for query_len in (3, 1):
            common = step([(row, 70 + turn, query_len) for row, _ in DECODES[:2]])
            torch.manual_seed(turn)
            kv_cache = torch.randn(NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)
            query = torch.randn(2 * query_len, NUM_HEADS, HEAD_SIZE)
            output, expected = torch.empty_like(query), torch.empty_like(query)
            impl.forward(LAYER, query, None, None, kv_cache, builder.build(0, common), output)
            attend(query, kv_cache, common, expected, scale=0.2)
            torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    assert len(made) == 2


def test_bits_do_not_depend_on_how_a_request_is_cut_into_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a stock backend: a token of a prompt, of a shorter one, and alone among others."""
    builder = make_builder(relay_cuda.RelayCudaMetadataBuilder, monkeypatch)
    impl = relay_cuda.RelayCudaImpl(NUM_HEADS, HEAD_SIZE, 0.2, NUM_KV_HEADS)
    torch.manual_seed(0)
    kv_cache = torch.randn(NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)
    query = torch.randn(100, NUM_HEADS, HEAD_SIZE)
    row, others = [1, 5, 6, 7], DECODES[:2]

    def computed(requests: list[Any], num_tokens: int) -> torch.Tensor:
        """Of the last of these requests, whose last query tokens are those of `query`."""
        common = step(requests)
        given = torch.randn(common.num_actual_tokens, NUM_HEADS, HEAD_SIZE)
        given[-num_tokens:] = query[-num_tokens:]
        output = torch.empty_like(given)
        metadata = builder.build(0, begin(builder, common))
        impl.forward(LAYER, given, None, None, kv_cache, metadata, output)
        return output[-num_tokens:]

    whole = computed([(row, 100, 100)], 100)
    assert torch.equal(computed([*others, (row, 100, 7)], 7), whole[-7:])
    assert torch.equal(computed([*others, (row, 100)], 1), whole[-1:])


def test_batches_nobody_has_told_of_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = make_builder(Builder, monkeypatch)
    recorder.begin_step()
    builder.build_for_cudagraph_capture(step(DECODES))
    stats = recorder.take_step()
    assert stats is not None and stats.groups == 0


def test_layers_that_read_the_cache_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sharing(StockImpl):
        def forward(self, layer: Any, query: Any, key: Any, value: Any, *rest: Any) -> None:
            assert key is None and value is None
            super().forward(layer, query, query, query, *rest)

    class SharingImpl(relay_cuda.RelayCudaImpl):
        stock_impl_cls = Sharing

    builder = make_builder(Builder, monkeypatch)
    impl = SharingImpl(NUM_HEADS, HEAD_SIZE, 0.2, NUM_KV_HEADS)
    common = step(DECODES + PROMPTS)
    query = torch.randn(common.num_actual_tokens, NUM_HEADS, HEAD_SIZE)
    kv_cache = torch.randn(NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)
    output, expected = torch.empty_like(query), torch.empty_like(query)
    impl.forward(LAYER, query, None, None, kv_cache, builder.build(0, common), output)
    attend(query, kv_cache, common, expected, scale=0.2)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "features",
    [
        {"sliding_window": 40},
        {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
        {"logits_soft_cap": 2.0},
        {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.bfloat16)},
    ],
    ids=lambda features: next(iter(features)),
)
def test_features_reach_the_kernels(
    monkeypatch: pytest.MonkeyPatch, features: dict[str, Any]
) -> None:
    builder = make_builder(relay_cuda.RelayCudaMetadataBuilder, monkeypatch)
    impl = relay_cuda.RelayCudaImpl(NUM_HEADS, HEAD_SIZE, 0.2, NUM_KV_HEADS, **features)
    common = step(DECODES)
    output, plain = run(builder, impl, common)
    torch.manual_seed(0)
    kv_cache = torch.randn(NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, 2 * HEAD_SIZE).transpose(1, 2)
    query = torch.randn(4, NUM_HEADS, HEAD_SIZE)
    key, value = torch.randn(2, 4, NUM_KV_HEADS, HEAD_SIZE)
    impl.do_kv_cache_update(LAYER, key, value, kv_cache, common.slot_mapping)
    if "alibi_slopes" in features:
        features = {"alibi_slopes": torch.tensor(features["alibi_slopes"])}
    expected = torch.empty_like(query)
    attend(query, kv_cache, common, expected, scale=0.2, **features)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    assert (output - plain).abs().max() > 1e-3


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RelayUnsupportedError, match="only causal decoder layers"):
        Impl(NUM_HEADS, HEAD_SIZE, 1.0, NUM_KV_HEADS, attn_type=AttentionType.ENCODER_ONLY)
    builder = make_builder(Builder, monkeypatch)
    common = step(DECODES)
    common.causal = False
    with pytest.raises(RelayUnsupportedError, match="non-causal attention"):
        builder.build(0, common)
    for spec, message in (
        ({"attention_chunk_size": 64}, "chunked local attention"),
        ({"head_size_v": 16}, "values of another size than keys"),
    ):
        with pytest.raises(RelayUnsupportedError, match=message):
            make_builder(Builder, monkeypatch, spec)
    with pytest.raises(ValueError, match="40 requests with 40 query tokens .* made for 8 with 8"):
        builder.build(0, step(DECODES * 10))
    impl = Impl(NUM_HEADS, HEAD_SIZE, 1.0, NUM_KV_HEADS)
    with pytest.raises(NotImplementedError, match="quantize its output"):
        impl.forward(LAYER, ONE, ONE, ONE, ONE, None, ONE, output_scale=ONE)


@pytest.mark.parametrize("name", ["RelayFlashBackend", "RelayTritonBackend"])
def test_stock_implementations_take_the_arguments_they_are_given(name: str) -> None:
    backend = getattr(relay_stock, name)
    ours = list(inspect.signature(RelayImplBase.__init__).parameters)
    theirs = list(inspect.signature(backend.get_impl_cls().stock_impl_cls.__init__).parameters)
    assert theirs[: len(ours)] == ours
    assert backend.get_builder_cls().stock_builder_cls is backend.stock.get_builder_cls()
    assert backend.get_impl_cls().stock_impl_cls is backend.stock.get_impl_cls()
    assert not backend.stock.forward_includes_kv_cache_update


def test_profiling_runs_leave_zeros() -> None:
    output = torch.ones(2, NUM_HEADS, HEAD_SIZE)
    impl = Impl(NUM_HEADS, HEAD_SIZE, 1.0, NUM_KV_HEADS)
    assert not impl.forward(LAYER, ONE, ONE, ONE, ONE, None, output).any()

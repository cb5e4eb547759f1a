# SPDX-License-Identifier: Apache-2.0
"""RELAY beside FlashAttention and FlashInfer: which steps share, and steps replayed as CUDA graphs
replay them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.model_executor.layers.attention.chunked_local_attention import (
    create_chunked_local_attention_backend,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym
from vllm.v1.attention.backends import flash_attn

from tests.attention_backends import flash_twin
from tests.attention_backends.node_workers import (
    BLOCK_SIZE,
    DEPTHS,
    FLASH_ATTENTION,
    FLASHINFER,
    HEADS,
    MAX_REQUESTS,
    Inputs,
    Kind,
    begin,
    check,
    layer,
    problems,
    shared_tokens,
    tree,
)
from tests.attention_backends.triton_problems import paths_of_levels
from vllm_relay.attention_backends.cuda import step_batch
from vllm_relay.attention_backends.cuda.flash import hooks
from vllm_relay.attention_backends.cuda.flash import relay as relay_nodes
from vllm_relay.attention_backends.cuda.flash.attention import NodeShapes
from vllm_relay.attention_backends.cuda.flash.nodes import CALL_BYTES
from vllm_relay.attention_backends.step_stats import StepRecorder
from vllm_relay.attention_backends.worker_blocks import WorkerBlocks
from vllm_relay.config import RelayConfig


@pytest.fixture(params=[FLASH_ATTENTION, FLASHINFER], ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kind:
    kind: Kind = request.param
    kind.stand_in(lambda *given: monkeypatch.setattr(*given, raising=False))
    return kind


@pytest.fixture
def flash_attention(monkeypatch: pytest.MonkeyPatch) -> Kind:
    FLASH_ATTENTION.stand_in(lambda *given: monkeypatch.setattr(*given, raising=False))
    return FLASH_ATTENTION


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> WorkerBlocks:
    state = WorkerBlocks()
    monkeypatch.setattr(step_batch, "follow_blocks", lambda vllm_config: state)
    monkeypatch.setattr(
        hooks, "get_layers_from_vllm_config",
        lambda config, cls, names: config.compilation_config.static_forward_context,
    )  # fmt: skip
    return state


def schedules(builder: Any) -> Any:
    """As for FlashAttention 3."""
    builder.aot_schedule, builder.kv_cache_dtype = True, torch.float32
    builder.cache_config = SimpleNamespace(cache_dtype="auto")
    builder.scheduler_metadata = torch.zeros(1 + 4 * MAX_REQUESTS, dtype=torch.int32)
    builder.max_num_splits = 32
    return builder


def replay(blocks: WorkerBlocks, kind: Kind, builder: Any, sinks: bool) -> None:
    """A graph keeps the metadata of its capture; builders write what it reads."""
    features = {"sinks": torch.linspace(-1, 2, HEADS)} if sinks else {}
    inputs = Inputs(MAX_REQUESTS, MAX_REQUESTS)
    inputs.query_start_loc.copy_(torch.arange(MAX_REQUESTS + 1))
    inputs.seq_lens.fill_(1)
    captured = builder.build(0, inputs.common())
    assert captured.shapes.num_rows == MAX_REQUESTS * builder.buffers.limits.max_states
    for problem, depth in zip(problems(features=features), DEPTHS, strict=True):
        begin(blocks, problem)
        inputs.fill(problem)
        builder.build(0, inputs.common())
        planned = builder.plans._planned
        assert planned is not None and planned.forest.depth == depth
        check(kind.attend(inputs, captured, problem, **features), problem)


@pytest.mark.parametrize("sinks", [False, True])
def test_a_captured_step_replays_any_other(blocks: WorkerBlocks, kind: Kind, sinks: bool) -> None:
    replay(blocks, kind, kind.builder(MAX_REQUESTS), sinks)


@pytest.mark.parametrize("sinks", [False, True])
def test_a_captured_schedule_is_that_of_any_other_step(
    blocks: WorkerBlocks, flash_attention: Kind, sinks: bool
) -> None:
    replay(blocks, flash_attention, schedules(flash_attention.builder(MAX_REQUESTS)), sinks)


@pytest.mark.parametrize("sinks", [False, True])
def test_prompts_and_decodes_of_a_step(blocks: WorkerBlocks, kind: Kind, sinks: bool) -> None:
    """Prompts read all of their tokens themselves; tokens that pad a step are nobody's."""
    features = {"sinks": torch.linspace(-1, 2, HEADS)} if sinks else {}
    builder = kind.builder()
    prompt = tree(
        [[("a", 9)]] * 4 + [[("b", 1)]] + [[("a", 9)]], tails=[5, 4, 3, 2, 1, 4],
        query_lens=[1, 1, 1, 1, 1, 3], features=features,
    )  # fmt: skip
    for each in (*problems(features=features, query_lens=None), prompt):
        inputs = Inputs.of(each)
        begin(blocks, each)
        metadata = builder.build(0, inputs.common())
        padding = torch.full_like(inputs.query[:2], torch.nan)
        inputs.query, inputs.out = (
            torch.cat((rows, padding)) for rows in (inputs.query, inputs.out)
        )
        check(kind.attend(inputs, metadata, each, **features), each)
    assert metadata.shapes == NodeShapes(1, 4, 4, 144)
    assert kind.tail_lens(metadata) == [5, 4, 3, 2, 17, 148]


def test_prompts_may_be_anywhere(blocks: WorkerBlocks, flash_attention: Kind) -> None:
    problem = tree(
        [[("a", 9)]] * 4 + [[("b", 1)]], tails=[5, 4, 3, 2, 1], query_lens=[1, 3, 1, 1, 1]
    )
    begin(blocks, problem)
    inputs = Inputs.of(problem)
    metadata = flash_attention.builder().build(0, inputs.common())
    check(flash_attention.attend(inputs, metadata, problem), problem)
    assert metadata.shapes == NodeShapes(1, 3, 3, 144)
    assert metadata.seq_lens.tolist() == [5, 148, 3, 2, 17]


def recorded(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Any]:
    """What an argument of FlashAttention is, call by call."""
    given: list[Any] = []

    def attend(*args: Any, **kwargs: Any) -> Any:
        given.append(kwargs[name])
        return flash_twin.flash_attn_varlen_func(*args, **kwargs)

    stock: Any = flash_attn
    monkeypatch.setattr(stock, "flash_attn_varlen_func", attend)
    return given


def test_nodes_are_scheduled_once_a_step(
    blocks: WorkerBlocks, flash_attention: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By FlashAttention 3; nodes that are not there are no longer in the schedule."""
    given = recorded(monkeypatch, "scheduler_metadata")
    for captured in (0, MAX_REQUESTS):
        builder = schedules(flash_attention.builder(captured))
        for problem in problems()[:2]:
            inputs = Inputs.of(problem)
            begin(blocks, problem)
            metadata = builder.build(0, inputs.common())
            for _ in range(2):
                check(flash_attention.attend(inputs, metadata, problem), problem)
            assert given[-2] is given[-4] is metadata.node_schedule is not None
            assert given[-1] is given[-3] is metadata.scheduler_metadata
            in_buffer = given[-2].data_ptr() == builder.buffers.schedule.data_ptr()
            assert in_buffer == bool(captured)
    assert builder.build(0, inputs.common(), fast_build=True).node_schedule is None


def test_splits_of_a_captured_step_are_those_of_its_tails(
    blocks: WorkerBlocks, flash_attention: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashAttention 3 keeps an output of each split for each row, and nodes have many rows."""
    splits = recorded(monkeypatch, "num_splits")
    problem = problems()[1]
    builder, inputs = flash_attention.builder(max_captured=6), Inputs.of(problem)
    builder.max_num_splits = 32
    begin(blocks, problem)
    metadata = builder.build(0, inputs.common())
    check(flash_attention.attend(inputs, metadata, problem), problem)
    assert splits == [1, 32]


def test_groups_are_found_again_when_requests_change(
    blocks: WorkerBlocks, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    find = step_batch.that_pay

    def counted(forest: Any, *args: Any) -> Any:
        found.append(len(forest.order))
        return find(forest, *args)

    monkeypatch.setattr(step_batch, "that_pay", counted)
    problem = problems()[1]
    builder, inputs = kind.builder(), Inputs(6, 6)
    begin(blocks, problem)
    for growth in range(4):  # its requests stay where their blocks are
        inputs.fill(problem)
        inputs.seq_lens += growth
        metadata = builder.build(0, inputs.common())
        assert kind.tail_lens(metadata) == [1 + growth] * 5 + [17 + growth]
    assert found == [6]
    begin(blocks, problem)
    builder.build(0, inputs.common())
    assert found == [6, 6]


@pytest.mark.parametrize(
    ("layer", "refused_by"),
    [
        ({"sliding_window": (63, 0)}, (FLASH_ATTENTION, FLASHINFER)),
        ({"alibi_slopes": torch.ones(HEADS)}, (FLASH_ATTENTION,)),
        ({"fa4_hd256": True}, (FLASH_ATTENTION,)),
        ({"logits_soft_cap": 50.0}, (FLASHINFER,)),
        ({}, ()),
    ],
)
def test_layers_that_do_not_see_all_share_nothing(
    blocks: WorkerBlocks, kind: Kind, layer: dict[str, Any], refused_by: tuple[Kind, ...]
) -> None:
    problem = problems()[1]
    begin(blocks, problem)
    inputs = Inputs.of(problem)
    builder = kind.builder(**layer)
    assert kind.is_stock(builder.build(0, inputs.common())) == (kind in refused_by)
    builder.options = RelayConfig(sharing=False)
    del builder.shares
    assert kind.is_stock(builder.build(0, inputs.common()))


def test_steps_that_are_not_causal_are_the_stock_backends(
    blocks: WorkerBlocks, flash_attention: Kind
) -> None:
    problem = problems()[1]
    begin(blocks, problem)
    inputs = Inputs.of(problem)
    metadata = flash_attention.builder().build(0, inputs.common(causal=False))
    assert flash_attention.is_stock(metadata)


@pytest.mark.parametrize("captured", [0, MAX_REQUESTS])
def test_what_saves_less_than_a_call_costs_is_shared_in_graphs_alone(
    blocks: WorkerBlocks, kind: Kind, captured: int
) -> None:
    """They hold that call in any case."""
    problem = problems()[1]
    begin(blocks, problem)
    inputs = Inputs.of(problem)
    builder = kind.builder(captured)
    common = inputs.common()
    batch = step_batch.StepBatch.of(builder.worker_blocks, common, common.num_reqs)
    saved_tokens = builder.plans.plan(batch, 6, 6).forest.saved_tokens
    assert saved_tokens > 0
    for saved_bytes, pays in ((CALL_BYTES, False), (CALL_BYTES + saved_tokens, True)):
        builder = kind.builder(captured)
        builder.kv_cache_spec.unpadded_page_size_bytes = BLOCK_SIZE * saved_bytes // saved_tokens
        metadata = builder.build(0, inputs.common())
        assert kind.is_stock(metadata) != (pays or bool(captured))


@pytest.mark.parametrize(
    ("tokens", "shares"), [(9 * BLOCK_SIZE, True), (9 * BLOCK_SIZE + 1, False)]
)
def test_shorter_prefixes_than_asked_for_are_left_alone(
    blocks: WorkerBlocks, kind: Kind, tokens: int, shares: bool
) -> None:
    problem = problems()[1]
    begin(blocks, problem)
    inputs = Inputs.of(problem)
    builder = kind.builder()
    builder.options = RelayConfig(min_shared_tokens=tokens)
    assert kind.is_stock(builder.build(0, inputs.common())) != shares


def test_requests_that_nobody_has_told_of_share_nothing(blocks: WorkerBlocks, kind: Kind) -> None:
    """Those of a dummy run, whose block table says nothing."""
    problem = problems()[1]
    begin(blocks, problem)
    inputs = Inputs.of(problem)
    blocks.begin_batch(SimpleNamespace(req_ids=[f"dummy {number}" for number in range(6)]))
    assert kind.is_stock(kind.builder().build(0, inputs.common()))
    begin(blocks, problem)
    inputs.seq_lens += 2 * BLOCK_SIZE  # nor those with more tokens than there are blocks for
    assert kind.is_stock(kind.builder().build(0, inputs.common()))


class LocalBackend(relay_nodes.RelayNodesBackend):
    builder_cls = FLASH_ATTENTION.builder


def test_requests_that_vllm_cuts_share_nothing(blocks: WorkerBlocks, flash_attention: Kind) -> None:
    """Rows of chunked local attention are chunks, and no rows of the worker's requests."""
    problem = tree([[("a", 36)]] * 6)
    begin(blocks, problem)
    inputs = Inputs.of(problem)
    local = create_chunked_local_attention_backend(LocalBackend, 320).get_builder_cls()()
    local.kv_cache_spec = SimpleNamespace(block_size=BLOCK_SIZE)
    assert flash_attention.is_stock(local.build(0, inputs.common()))


def test_batches_that_are_made_up_share_nothing(blocks: WorkerBlocks, kind: Kind) -> None:
    """Model runner V2 captures graphs before the first step."""
    builder, inputs = kind.builder(max_captured=6), Inputs(6, 6)
    inputs.query_start_loc.copy_(torch.arange(7))
    inputs.seq_lens.fill_(1)
    problem = problems()[1]
    for _ in range(2):
        blocks.begin_batch(SimpleNamespace(req_ids=[f"req_{number}" for number in range(6)]))
        metadata = builder.build(0, inputs.common())
        assert kind.tail_lens(metadata) == [1] * 6
        assert not metadata.buffers.entry_lens.any()
        begin(blocks, problem)


@pytest.mark.parametrize("captured", [0, 3 * MAX_REQUESTS])
@pytest.mark.parametrize("most", [3, 4])
def test_drafts_are_verified_together(
    blocks: WorkerBlocks, kind: Kind, captured: int, most: int
) -> None:
    """Up to three query tokens of each request; of a prompt, more, and they share nothing. Hosts
    know how long requests are if all drafts of the step before were right. To FlashInfer, decodes
    are those at the beginning that have as many query tokens as the first."""
    builder = kind.builder(captured, CUDAGraphMode.FULL_DECODE_ONLY, num_drafts=2)
    query_lens = [3, 3, 3, 3, 1, 2, 3, 3, 2, 1, 3, most]
    problem = tree([[("a", 9)]] * 12, tails=[9] * 12, query_lens=query_lens)
    begin(blocks, problem)
    inputs = Inputs.of(problem)
    bounds = inputs.seq_lens + 2
    metadata = builder.build(0, inputs.common(seq_lens_cpu_upper_bound=bounds))
    check(kind.attend(inputs, metadata, problem), problem)
    shared = shared_tokens(builder)
    num_sharing = 4 if kind is FLASHINFER else 12 - (most > 3)
    assert (shared > 0).tolist() == [True] * num_sharing + [False] * (12 - num_sharing)
    assert (shared <= bounds.numpy() - query_lens - 2).all()
    assert (metadata.shapes.num_entries == builder.buffers.limits.max_entries) == (
        most == 3 and captured > 0
    )


def test_a_captured_step_of_drafts_replays_any_other(blocks: WorkerBlocks, kind: Kind) -> None:
    """Rows of padding have no query tokens."""
    builder = kind.builder(3 * MAX_REQUESTS, CUDAGraphMode.FULL_DECODE_ONLY, num_drafts=2)
    inputs = Inputs(MAX_REQUESTS, 3 * MAX_REQUESTS)
    inputs.query_start_loc.copy_(3 * torch.arange(MAX_REQUESTS + 1))
    inputs.seq_lens.fill_(3)
    captured = builder.build(0, inputs.common())
    for num_nodes, paths in (
        (2, paths_of_levels([1, 2, 6], [12, 20, 1]) * 2),
        (1, [[("a", 9)]] * 5),
    ):
        problem = tree(paths, tails=[9] * len(paths), query_lens=[3] * len(paths))
        begin(blocks, problem)
        inputs.fill(problem)
        builder.build(0, inputs.common())
        assert len(builder.plans._planned.forest.nodes) == num_nodes
        check(kind.attend(inputs, captured, problem), problem)


def test_drafts_are_the_stock_backends(
    blocks: WorkerBlocks, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On both model runners. V2 replays all drafts of a step as one graph, which calls nothing on
    the host but what is in the stock backend's."""
    builder = kind.builder(MAX_REQUESTS, num_drafts=2)
    if kind is FLASH_ATTENTION:
        schedules(builder)
    problem = problems()[1]
    inputs = Inputs.of(problem)
    begin(blocks, problem)
    assert not kind.is_stock(builder.build(0, inputs.common()))
    blocks.end_batch()  # of V2
    drafts = [builder.build(0, inputs.common())]
    blocks.begin_batch(blocks.batch)
    assert not kind.is_stock(builder.build(0, inputs.common()))
    drafts.append(builder.build_for_drafting(inputs.common(), 0))
    for metadata in drafts:
        assert kind.is_stock(metadata)
        for _ in range(2):
            builder.update_draft_decode_metadata(metadata)
            inputs.out.fill_(torch.nan)
            check(kind.attend(inputs, metadata, problem), problem)
            assert kind.tail_lens(metadata) == inputs.seq_lens.tolist()
            assert getattr(metadata, "scheduler_metadata", None) is None


def test_groups_are_found_again_when_tokens_are_lost(blocks: WorkerBlocks, kind: Kind) -> None:
    problem = problems()[1]
    builder, inputs = kind.builder(max_captured=6), Inputs.of(problem)
    begin(blocks, problem)
    assert kind.tail_lens(builder.build(0, inputs.common())) == [1] * 5 + [17]
    inputs.seq_lens[0] = 40
    metadata = builder.build(0, inputs.common())
    assert kind.tail_lens(metadata) == [40, 1, 1, 1, 1, 17]


def test_layers_do_not_offer_to_quantize_their_output(blocks: WorkerBlocks, kind: Kind) -> None:
    """FlashInfer's own do; a merge in between has none of it."""
    impl = kind.impl(supports_xqa_or_trtllm_gen_decode=True, kv_cache_dtype="fp8")
    assert not impl.fused_output_quant_supported(kFp8StaticTensorSym)
    problem = problems()[1]
    begin(blocks, problem)
    inputs = Inputs.of(problem)
    metadata = kind.builder().build(0, inputs.common())
    scale = torch.ones(())
    with pytest.raises(NotImplementedError, match="disable output fusion"):
        impl.forward(layer(), inputs.query, None, None, None, metadata, inputs.out, scale)


def test_queries_and_caches_in_fp8(blocks: WorkerBlocks, kind: Kind) -> None:
    """Scaled as the stock backend does; outputs of nodes are no coarser than those of tails."""
    problem = problems()[0]
    begin(blocks, problem)
    inputs = Inputs.of(problem)
    inputs.query = inputs.query.to(torch.float8_e4m3fn)
    cache = kind.cache(problem).to(torch.float8_e4m3fn).view(torch.uint8)
    impl = kind.impl(supports_quant_query_input=True, kv_cache_dtype="fp8", cache_dtype="fp8")
    answers: list[torch.Tensor] = []
    for sharing in (True, False):
        builder = kind.builder()
        builder.options = RelayConfig(sharing=sharing)
        builder.q_data_type_decode = torch.float8_e4m3fn
        metadata = builder.build(0, inputs.common())
        assert kind.is_stock(metadata) != sharing
        scaled = layer(q=0.5, k=3.0, v=0.25)
        impl.forward(scaled, inputs.query, None, None, cache, metadata, inputs.out)
        answers.append(inputs.out.clone())
    torch.testing.assert_close(*answers, rtol=1e-4, atol=1e-4)


def test_steps_with_prompts_are_the_stock_backends_where_decodes_alone_are_captured(
    blocks: WorkerBlocks, flash_attention: Kind
) -> None:
    inputs = Inputs(3, 6)
    inputs.query_start_loc.copy_(torch.tensor([0, 1, 2, 6]))
    inputs.seq_lens.copy_(torch.tensor([1, 1, 4]))
    for mode, query_len, is_captured in (
        (CUDAGraphMode.FULL, 4, True),
        (CUDAGraphMode.FULL_AND_PIECEWISE, 4, False),
        (CUDAGraphMode.FULL_DECODE_ONLY, 4, False),
        (CUDAGraphMode.FULL_DECODE_ONLY, 1, True),
    ):
        builder = flash_attention.builder(6, mode)
        metadata = builder.build(0, inputs.common(max_query_len=query_len))
        assert flash_attention.is_stock(metadata) != is_captured


def test_steps_of_one_request_are_counted(
    blocks: WorkerBlocks, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = StepRecorder()
    monkeypatch.setattr(step_batch, "recorder", recorder)
    inputs = Inputs(1, 1)
    inputs.query_start_loc.copy_(torch.arange(2))
    inputs.seq_lens.fill_(40)
    assert kind.is_stock(kind.builder(max_captured=6).build(0, inputs.common()))
    step = recorder.take_step()
    assert step is not None
    assert (step.steps, step.request_steps, step.request_steps_shared) == (1, 1, 0)
    assert step.kv_tokens_logical == step.kv_tokens_read == 40

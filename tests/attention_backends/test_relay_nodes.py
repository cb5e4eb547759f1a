# SPDX-License-Identifier: Apache-2.0
"""RELAY beside FlashAttention: which steps share, and steps replayed as CUDA graphs replay them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.model_executor.layers.attention.chunked_local_attention import (
    create_chunked_local_attention_backend,
)
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import flash_attn

from tests.attention_backends import flash_twin
from tests.attention_backends.strategies import AttentionProblem, error_bounds
from tests.attention_backends.told_blocks import tell
from tests.attention_backends.triton_problems import cuda_cache, paths_of_levels, tree_problem
from vllm_relay.attention_backends import reference
from vllm_relay.attention_backends.cuda import step_batch
from vllm_relay.attention_backends.cuda.flash import relay as relay_nodes
from vllm_relay.attention_backends.cuda.flash.nodes import CALL_BYTES
from vllm_relay.attention_backends.step_stats import StepRecorder
from vllm_relay.attention_backends.worker_blocks import WorkerBlocks
from vllm_relay.config import RelayConfig

HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 4, 2, 32, 16
MAX_REQUESTS, MAX_MODEL_LEN = 12, 640
LAYER = SimpleNamespace(_q_scale=torch.ones(()), _k_scale=torch.ones(()), _v_scale=torch.ones(()))


@pytest.fixture(autouse=True)
def twin(monkeypatch: pytest.MonkeyPatch) -> None:
    stock: Any = flash_attn
    for name in flash_twin.STOOD_FOR:
        monkeypatch.setattr(stock, name, getattr(flash_twin, name), raising=False)


class Builder(relay_nodes.RelayNodesMetadataBuilder):
    """With what a worker would give it.

    Args:
        max_captured: tokens of the largest captured graph, 0 for none.
        mode: of these graphs.
        num_drafts: of speculative decoding.
        layer: fields of the group's layer.
    """

    def __init__(
        self,
        max_captured: int = 0,
        mode: CUDAGraphMode = CUDAGraphMode.FULL,
        num_drafts: int = 0,
        **layer: Any,
    ) -> None:
        fields = {"sliding_window": (-1, -1), "alibi_slopes": None, "fa4_hd256": False} | layer
        layers = {"layer": SimpleNamespace(impl=SimpleNamespace(**fields))}
        self.layer_names = list(layers)
        self.device = torch.device("cpu")
        self.options = RelayConfig()
        self.model_config = SimpleNamespace(max_model_len=MAX_MODEL_LEN)
        self.vllm_config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=MAX_REQUESTS),
            compilation_config=SimpleNamespace(static_forward_context=layers),
            num_speculative_tokens=num_drafts,
        )
        self.use_full_cuda_graph, self.max_cudagraph_size = bool(max_captured), max_captured
        self.compilation_config = SimpleNamespace(cudagraph_mode=mode)
        self.max_num_splits, self.block_size = 0, BLOCK_SIZE
        # each token that is saved pays
        self.kv_cache_spec = SimpleNamespace(unpadded_page_size_bytes=2 * BLOCK_SIZE * CALL_BYTES)
        self.num_heads_q, self.num_heads_kv, self.headdim = HEADS, KV_HEADS, HEAD_SIZE
        self.aot_schedule, self.aot_sliding_window = False, (-1, -1)
        self.dcp_world_size, self.rswa_window = 1, None
        self.mm_prefix_query_ranges_np = self.rswa_prefix_lens = None
        self.layers = layers
        self.worker_blocks = step_batch.follow_blocks(self.vllm_config)


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> WorkerBlocks:
    state = WorkerBlocks()
    monkeypatch.setattr(step_batch, "follow_blocks", lambda vllm_config: state)
    monkeypatch.setattr(
        relay_nodes, "get_layers_from_vllm_config",
        lambda config, cls, names: config.compilation_config.static_forward_context,
    )  # fmt: skip
    return state


def begin(blocks: WorkerBlocks, problem: AttentionProblem) -> None:
    """A step in which all requests of the problem are new."""
    tell(blocks, problem.block_table.numpy(), problem.seq_lens.numpy(), BLOCK_SIZE)


class Inputs:
    """The buffers of a model runner, which stay where they are."""

    def __init__(self, num_requests: int, num_tokens: int) -> None:
        self.num_requests, self.num_tokens = num_requests, num_tokens
        self.query_start_loc = torch.zeros(num_requests + 1, dtype=torch.int32)
        self.seq_lens = torch.zeros(num_requests, dtype=torch.int32)
        self.block_table = torch.zeros(num_requests, MAX_MODEL_LEN // BLOCK_SIZE).int()
        self.query = torch.zeros(num_tokens, HEADS, HEAD_SIZE)
        self.out = torch.zeros(num_tokens, HEADS, HEAD_SIZE)

    def fill(self, problem: AttentionProblem) -> None:
        """With rows of padding behind the requests."""
        requests, tokens = problem.num_requests, len(problem.query)
        self.query_start_loc.fill_(tokens)[: requests + 1] = problem.query_start_loc
        self.seq_lens.zero_()[:requests] = problem.seq_lens
        self.block_table.zero_()[:requests, : problem.block_table.shape[1]] = problem.block_table
        self.query[:tokens] = problem.query
        self.out.fill_(torch.nan)

    def common(self, **changes: Any) -> CommonAttentionMetadata:
        fields = {
            "query_start_loc": self.query_start_loc,
            "query_start_loc_cpu": self.query_start_loc.clone(),
            "seq_lens": self.seq_lens,
            "seq_lens_cpu_upper_bound": self.seq_lens.clone(),
            "num_reqs": self.num_requests,
            "num_actual_tokens": self.num_tokens,
            "max_query_len": int(self.query_start_loc.diff().max()) or 1,
            "max_seq_len": MAX_MODEL_LEN,
            "block_table_tensor": self.block_table,
            "slot_mapping": torch.zeros(self.num_tokens, dtype=torch.int64),
            "causal": True,
        }
        return CommonAttentionMetadata(**(fields | changes))


def builder_batch(builder: Builder, inputs: Inputs) -> step_batch.StepBatch:
    common = inputs.common()
    return step_batch.StepBatch.of(builder.worker_blocks, common, common.num_reqs)


def impl(**fields: Any) -> relay_nodes.RelayNodesImpl:
    made = object.__new__(relay_nodes.RelayNodesImpl)
    made.head_size, made.num_kv_heads, made.scale = HEAD_SIZE, KV_HEADS, HEAD_SIZE**-0.5
    made.logits_soft_cap, made.sinks = 0, None
    made.vllm_flash_attn_version, made.supports_quant_query_input = 2, False
    made.attn_type, made.dcp_world_size, made.kv_cache_dtype = "decoder", 1, "auto"
    made.sliding_window, made.alibi_slopes, made.fa4_hd256 = (-1, -1), None, False
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def attend(inputs: Inputs, metadata: Any, problem: AttentionProblem, **fields: Any) -> torch.Tensor:
    cache = cuda_cache(problem)
    impl(**fields).forward(LAYER, inputs.query, None, None, cache, metadata, inputs.out)
    return inputs.out[: len(problem.query)]


def is_stock(metadata: Any) -> bool:
    """Whether a step is the stock backend's."""
    return type(metadata) is flash_attn.FlashAttentionMetadata


def check(out: torch.Tensor, problem: AttentionProblem) -> None:
    expected, _ = problem.solve(reference.relay_attention, output_dtype=torch.float64)
    bound, _ = error_bounds(problem)
    assert ((out.double() - expected).abs() <= bound).all()


def problems(**keywords: Any) -> list[AttentionProblem]:
    options = {"heads": (HEADS, KV_HEADS), "head_size": HEAD_SIZE, "dtype": torch.float32}
    trees = (
        paths_of_levels([1, 2, 6], [16, 14, 1]) * 2,
        [[("a", 9)]] * 5 + [[("b", 1)]],
        [[(name, 3)] for name in "abcd"],
        paths_of_levels([1, 5], [20, 1]) * 2,
    )
    return [tree_problem(paths, **options, **keywords) for paths in trees]


def schedules(builder: Builder) -> Builder:
    """As for FlashAttention 3."""
    builder.aot_schedule, builder.kv_cache_dtype = True, torch.float32
    builder.cache_config = SimpleNamespace(cache_dtype="auto")
    builder.scheduler_metadata = torch.zeros(1 + 4 * MAX_REQUESTS, dtype=torch.int32)
    builder.max_num_splits = 32
    return builder


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("made", [lambda builder: builder, schedules], ids=["2", "3"])
def test_a_captured_step_replays_any_other(blocks: WorkerBlocks, sinks: bool, made: Any) -> None:
    """A graph keeps the metadata of its capture; builders write what it reads."""
    features = {"sinks": torch.linspace(-1, 2, HEADS)} if sinks else {}
    builder, inputs = Builder(max_captured=MAX_REQUESTS), Inputs(MAX_REQUESTS, MAX_REQUESTS)
    made(builder)
    inputs.query_start_loc.copy_(torch.arange(MAX_REQUESTS + 1))
    inputs.seq_lens.fill_(1)
    captured = builder.build(0, inputs.common())
    assert captured.shapes.num_rows == MAX_REQUESTS * builder.buffers.limits.max_states
    for problem, depth in zip(problems(features=features), (2, 1, 0, 1), strict=True):
        begin(blocks, problem)
        inputs.fill(problem)
        builder.build(0, inputs.common())
        planned = builder.plans._planned
        assert planned is not None and planned.forest.depth == depth
        check(attend(inputs, captured, problem, **features), problem)


def test_prompts_and_decodes_of_a_step(blocks: WorkerBlocks) -> None:
    """Prompts read all of their tokens themselves."""
    builder = Builder()
    for problem in problems(query_lens=None):
        query_lens = [1] * problem.num_requests
        query_lens[1] = 3
        prompt = tree_problem(
            [[("a", 9)]] * 4 + [[("b", 1)]], tails=[5, 4, 3, 2, 1], query_lens=[1, 3, 1, 1, 1],
            heads=(HEADS, KV_HEADS), head_size=HEAD_SIZE, dtype=torch.float32,
        )  # fmt: skip
        for each in (problem, prompt):
            inputs = Inputs(each.num_requests, len(each.query))
            begin(blocks, each)
            inputs.fill(each)
            metadata = builder.build(0, inputs.common())
            check(attend(inputs, metadata, each), each)
    assert metadata.shapes == relay_nodes.NodeShapes(1, 3, 3, 144)
    assert metadata.seq_lens.tolist() == [5, 148, 3, 2, 17]


def test_nodes_are_scheduled_once_a_step(
    blocks: WorkerBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By FlashAttention 3; nodes that are not there are no longer in the schedule."""
    given: list[Any] = []

    def recorded(*args: Any, **kwargs: Any) -> Any:
        given.append(kwargs["scheduler_metadata"])
        return flash_twin.flash_attn_varlen_func(*args, **kwargs)

    stock: Any = flash_attn
    monkeypatch.setattr(stock, "flash_attn_varlen_func", recorded)
    for captured in (0, MAX_REQUESTS):
        builder = schedules(Builder(captured))
        for problem in problems()[:2]:
            inputs = Inputs(problem.num_requests, problem.num_requests)
            begin(blocks, problem)
            inputs.fill(problem)
            metadata = builder.build(0, inputs.common())
            for _ in range(2):
                check(attend(inputs, metadata, problem), problem)
            assert given[-2] is given[-4] is metadata.node_schedule is not None
            assert given[-1] is given[-3] is metadata.scheduler_metadata
            in_buffer = given[-2].data_ptr() == builder.buffers.schedule.data_ptr()
            assert in_buffer == bool(captured)
    assert builder.build(0, inputs.common(), fast_build=True).node_schedule is None


def test_groups_are_found_again_when_requests_change(
    blocks: WorkerBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    find = step_batch.that_pay

    def counted(forest: Any, *args: Any) -> Any:
        found.append(len(forest.order))
        return find(forest, *args)

    monkeypatch.setattr(step_batch, "that_pay", counted)
    problem = problems()[1]
    builder, inputs = Builder(), Inputs(6, 6)
    begin(blocks, problem)
    for growth in range(4):  # its requests stay where their blocks are
        inputs.fill(problem)
        inputs.seq_lens += growth
        metadata = builder.build(0, inputs.common())
        assert metadata.seq_lens.tolist() == [1 + growth] * 5 + [17 + growth]
    assert found == [6]
    begin(blocks, problem)
    builder.build(0, inputs.common())
    assert found == [6, 6]


@pytest.mark.parametrize(
    "layer",
    [
        {"sliding_window": (63, 0)},
        {"alibi_slopes": torch.ones(HEADS)},
        {"fa4_hd256": True},
        {},
    ],
)
def test_layers_that_do_not_see_all_share_nothing(
    blocks: WorkerBlocks, layer: dict[str, Any]
) -> None:
    problem = problems()[1]
    begin(blocks, problem)
    inputs = Inputs(6, 6)
    inputs.fill(problem)
    builder = Builder(**layer)
    assert is_stock(builder.build(0, inputs.common())) == bool(layer)
    assert is_stock(builder.build(0, inputs.common(causal=False)))
    builder.options = RelayConfig(sharing=False)
    del builder.shares
    assert is_stock(builder.build(0, inputs.common()))


@pytest.mark.parametrize("captured", [0, MAX_REQUESTS])
def test_what_saves_less_than_a_call_costs_is_shared_in_graphs_alone(
    blocks: WorkerBlocks, captured: int
) -> None:
    """They hold that call in any case."""
    problem = problems()[1]
    begin(blocks, problem)
    inputs = Inputs(6, 6)
    inputs.fill(problem)
    builder = Builder(captured)
    saved_tokens = builder.plans.plan(builder_batch(builder, inputs), 6).forest.saved_tokens
    assert saved_tokens > 0
    for saved_bytes, pays in ((CALL_BYTES, False), (CALL_BYTES + saved_tokens, True)):
        builder = Builder(captured)
        builder.kv_cache_spec.unpadded_page_size_bytes = BLOCK_SIZE * saved_bytes // saved_tokens
        metadata = builder.build(0, inputs.common())
        assert is_stock(metadata) != (pays or bool(captured))


@pytest.mark.parametrize(
    ("tokens", "shares"), [(9 * BLOCK_SIZE, True), (9 * BLOCK_SIZE + 1, False)]
)
def test_shorter_prefixes_than_asked_for_are_left_alone(
    blocks: WorkerBlocks, tokens: int, shares: bool
) -> None:
    problem = problems()[1]
    begin(blocks, problem)
    inputs = Inputs(6, 6)
    inputs.fill(problem)
    builder = Builder()
    builder.options = RelayConfig(min_shared_tokens=tokens)
    assert is_stock(builder.build(0, inputs.common())) != shares


def test_requests_that_nobody_has_told_of_share_nothing(blocks: WorkerBlocks) -> None:
    """Those of a dummy run, whose block table says nothing."""
    problem = problems()[1]
    begin(blocks, problem)
    inputs = Inputs(6, 6)
    inputs.fill(problem)
    blocks.begin_batch(SimpleNamespace(req_ids=[f"dummy {number}" for number in range(6)]))
    assert is_stock(Builder().build(0, inputs.common()))
    begin(blocks, problem)
    inputs.seq_lens += 2 * BLOCK_SIZE  # nor those with more tokens than there are blocks for
    assert is_stock(Builder().build(0, inputs.common()))


class LocalBackend(relay_nodes.RelayNodesBackend):
    @staticmethod
    def get_builder_cls() -> type[Any]:
        return Builder


def test_requests_that_vllm_cuts_share_nothing(blocks: WorkerBlocks) -> None:
    """Rows of chunked local attention are chunks, and no rows of the worker's requests."""
    problem = tree_problem([[("a", 36)]] * 6, heads=(HEADS, KV_HEADS), head_size=HEAD_SIZE)
    begin(blocks, problem)
    inputs = Inputs(6, 6)
    inputs.fill(problem)
    local = create_chunked_local_attention_backend(LocalBackend, 320).get_builder_cls()()
    local.kv_cache_spec = SimpleNamespace(block_size=BLOCK_SIZE)
    assert is_stock(local.build(0, inputs.common()))


def test_batches_that_are_made_up_share_nothing(blocks: WorkerBlocks) -> None:
    """Model runner V2 captures graphs before the first step."""
    builder, inputs = Builder(max_captured=6), Inputs(6, 6)
    inputs.query_start_loc.copy_(torch.arange(7))
    inputs.seq_lens.fill_(1)
    problem = problems()[1]
    for _ in range(2):
        blocks.begin_batch(SimpleNamespace(req_ids=[f"req_{number}" for number in range(6)]))
        metadata = builder.build(0, inputs.common())
        assert metadata.seq_lens.tolist() == [1] * 6
        assert not metadata.buffers.entry_lens.any()
        begin(blocks, problem)


@pytest.mark.parametrize("captured", [0, 3 * MAX_REQUESTS])
def test_drafts_are_verified_together(blocks: WorkerBlocks, captured: int) -> None:
    """Up to three query tokens of each request; of a prompt, more, and they share nothing. Hosts
    know how long requests are if all drafts of the step before were right."""
    builder = Builder(captured, CUDAGraphMode.FULL_DECODE_ONLY, num_drafts=2)
    shape = {"heads": (HEADS, KV_HEADS), "head_size": HEAD_SIZE, "dtype": torch.float32}
    paths = paths_of_levels([1, 2, 6], [12, 20, 1]) * 2
    for most in (3, 4):
        query_lens = [most, 3, 1, 2, 3, 3, 3, 2, 1, 3, 3, 3]
        problem = tree_problem(paths, tails=[9] * 12, query_lens=query_lens, **shape)
        begin(blocks, problem)
        inputs = Inputs(12, sum(query_lens))
        inputs.fill(problem)
        bounds = inputs.seq_lens + 2
        metadata = builder.build(0, inputs.common(seq_lens_cpu_upper_bound=bounds))
        check(attend(inputs, metadata, problem), problem)
        planned = builder.plans._planned
        assert planned is not None
        shared = planned.forest.shared_tokens
        assert (shared > 0).tolist() == [most == 3] + [True] * 11
        assert (shared <= bounds.numpy() - query_lens - 2).all()
        assert (metadata.shapes.num_entries == builder.buffers.limits.max_entries) == (
            most == 3 and captured > 0
        )


def test_drafts_are_the_stock_backends(
    blocks: WorkerBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On both model runners. V2 replays all drafts of a step as one graph, which calls nothing on
    the host but what is in the stock backend's."""
    builder = schedules(Builder(MAX_REQUESTS, num_drafts=2))
    problem = problems()[1]
    inputs = Inputs(6, 6)
    begin(blocks, problem)
    inputs.fill(problem)
    assert not is_stock(builder.build(0, inputs.common()))
    blocks.end_batch()  # of V2
    drafts = [builder.build(0, inputs.common())]
    blocks.begin_batch(blocks.batch)
    assert not is_stock(builder.build(0, inputs.common()))
    drafts.append(builder.build_for_drafting(inputs.common(), 0))
    for metadata in drafts:
        assert is_stock(metadata) and metadata.block_table is inputs.block_table
        for _ in range(2):
            builder.update_draft_decode_metadata(metadata)
            inputs.out.fill_(torch.nan)
            check(attend(inputs, metadata, problem), problem)
            assert metadata.seq_lens is inputs.seq_lens and metadata.scheduler_metadata is None


def test_groups_are_found_again_when_tokens_are_lost(blocks: WorkerBlocks) -> None:
    problem = problems()[1]
    builder, inputs = Builder(max_captured=6), Inputs(6, 6)
    begin(blocks, problem)
    inputs.fill(problem)
    assert builder.build(0, inputs.common()).seq_lens.tolist() == [1] * 5 + [17]
    inputs.seq_lens[0] = 40
    metadata = builder.build(0, inputs.common())
    assert metadata.seq_lens.tolist() == [40, 1, 1, 1, 1, 17]


def test_splits_of_a_captured_step_are_those_of_its_tails(
    blocks: WorkerBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashAttention 3 keeps an output of each split for each row, and nodes have many rows."""
    splits: list[int] = []

    def recorded(*args: Any, **kwargs: Any) -> Any:
        splits.append(kwargs["num_splits"])
        return flash_twin.flash_attn_varlen_func(*args, **kwargs)

    stock: Any = flash_attn
    monkeypatch.setattr(stock, "flash_attn_varlen_func", recorded)
    problem = problems()[1]
    builder, inputs = Builder(max_captured=6), Inputs(6, 6)
    builder.max_num_splits = 32
    begin(blocks, problem)
    inputs.fill(problem)
    check(attend(inputs, builder.build(0, inputs.common()), problem), problem)
    assert splits == [1, 32]


def test_queries_in_fp8(blocks: WorkerBlocks) -> None:
    """Outputs of nodes are no coarser than those of tails."""
    problem = problems()[0]
    begin(blocks, problem)
    inputs = Inputs(problem.num_requests, problem.num_requests)
    inputs.fill(problem)
    inputs.query = inputs.query.to(torch.float8_e4m3fn)
    answers: list[torch.Tensor] = []
    for sharing in (True, False):
        builder = Builder()
        builder.options = RelayConfig(sharing=sharing)
        metadata = builder.build(0, inputs.common())
        assert is_stock(metadata) != sharing
        answers.append(attend(inputs, metadata, problem, supports_quant_query_input=True).clone())
    torch.testing.assert_close(*answers, rtol=1e-4, atol=1e-4)


def test_steps_with_prompts_are_the_stock_backends_where_decodes_alone_are_captured(
    blocks: WorkerBlocks,
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
        metadata = Builder(6, mode).build(0, inputs.common(max_query_len=query_len))
        assert is_stock(metadata) != is_captured


def test_steps_of_one_request_are_counted(
    blocks: WorkerBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = StepRecorder()
    monkeypatch.setattr(step_batch, "recorder", recorder)
    inputs = Inputs(1, 1)
    inputs.query_start_loc.copy_(torch.arange(2))
    inputs.seq_lens.fill_(40)
    assert is_stock(Builder(max_captured=6).build(0, inputs.common()))
    step = recorder.take_step()
    assert step is not None
    assert (step.steps, step.request_steps, step.request_steps_shared) == (1, 1, 0)
    assert step.kv_tokens_logical == step.kv_tokens_read == 40

# SPDX-License-Identifier: Apache-2.0
"""FlashAttention over the nodes of a forest: its batches, and what comes out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.attention_backends.flash_twin import flash_attn_varlen_func
from tests.attention_backends.strategies import AttentionProblem, error_bounds
from tests.attention_backends.triton_problems import (
    cuda_cache,
    paths_of_levels,
    small_problem,
    strided,
    tree_problem,
)
from vllm_relay.attention_backends.cuda.flash import attention
from vllm_relay.attention_backends.cuda.flash.attention import NodeBuffers, NodeShapes
from vllm_relay.attention_backends.cuda.flash.branch import Branch
from vllm_relay.attention_backends.cuda.flash.nodes import (
    FIRST_BLOCK,
    FLASH_ROWS,
    MAX_STATES,
    MAX_WAVES,
    MIN_PIECE_TOKENS,
    STATE_TOKENS,
    TOKENS,
    NodeBatch,
    NodeLimits,
    NodeSetup,
    balanced_piece_tokens,
    node_batch,
)
from vllm_relay.attention_backends.forest import (
    BEGIN_TOKENS,
    END_TOKENS,
    FIRST,
    LAST,
    Forest,
    build_forest,
)

NODE_KERNELS = ("tables_kernel", "gather_rows_kernel", "merge_nodes_kernel")
NOT_SPECIALIZED = {
    "num_requests", "block_table_stride", "out_stride", "entry_lse_stride", "lse_stride",
}  # fmt: skip
LIMITS = NodeLimits(
    max_requests=8, max_tokens=256, max_sharing_tokens=256, max_entries=6, max_states=3
)


def forest_of(problem: AttentionProblem) -> Forest:
    # a tail has the query token itself at least
    query_lens = problem.query_lens.numpy()
    before = np.where(query_lens > 0, problem.seq_lens.numpy() - query_lens, 0)
    return build_forest(problem.block_table.numpy(), before, problem.block_size)


def setup_of(block_size: int) -> NodeSetup:
    return NodeSetup(block_size, group_size=1, num_kv_heads=1, num_sms=1)


def batch_of(
    problem: AttentionProblem, limits: NodeLimits = LIMITS, piece_blocks: int = 2
) -> tuple[Forest, NodeBatch]:
    return node_batch(
        forest_of(problem),
        problem.query_start_loc.numpy(),
        setup_of(problem.block_size),
        limits,
        piece_blocks * problem.block_size,
    )


def solve(
    problem: AttentionProblem,
    batch: NodeBatch,
    limits: NodeLimits = LIMITS,
    *,
    is_fixed: bool = False,
) -> torch.Tensor:
    """The twin's answer, tables and merging by the kernels.

    Args:
        is_fixed: with the shapes that a captured graph has.
    """
    num_tokens, width = len(problem.query), problem.block_table.shape[1]
    buffers = NodeBuffers(
        limits, setup_of(problem.block_size), max_blocks=max(1, width), device="cpu"
    )
    buffers.upload(batch, num_tokens)
    shapes = NodeShapes.captured(limits, num_tokens, width * problem.block_size)
    if not is_fixed:
        shapes = NodeShapes.of(batch)
    buffers.write_tables(problem.block_table, problem.seq_lens, shapes.num_entries)
    key, value = cuda_cache(problem).transpose(1, 2).chunk(2, dim=-1)
    options = {
        "softmax_scale": problem.scale,
        "softcap": problem.features.get("logits_soft_cap", 0.0),
    }
    out = strided(torch.full_like(problem.query, torch.nan))

    buffers.attend(
        flash_attn_varlen_func, problem.query, key, value, out, shapes,
        query_start_loc=problem.query_start_loc,
        tails={"max_seqlen_q": num_tokens, "max_seqlen_k": width * problem.block_size},
        sinks=problem.features.get("sinks"), **options,
    )  # fmt: skip
    return out


@given(seed=st.integers(0, 2**32 - 1))
def test_output_is_that_of_the_reference(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = small_problem(rng, use_features=False)
    if rng.integers(2):
        problem.features["logits_soft_cap"] = 20.0
    if rng.integers(2):
        problem.features["sinks"] = torch.from_numpy(rng.standard_normal(problem.query.shape[1]))
    limits = replace(
        LIMITS, max_entries=int(rng.integers(1, 9)), max_states=int(rng.integers(1, 5))
    )
    _, batch = batch_of(problem, limits, piece_blocks=int(rng.integers(1, 4)))
    expected, _ = problem.expected
    bound, _ = error_bounds(problem)
    out = solve(problem, batch, limits, is_fixed=bool(rng.integers(2)))
    error = (out.double() - expected).abs()
    assert (error <= bound).all(), (problem.description, float((error / bound).max()))


@given(seed=st.integers(0, 2**32 - 1))
def test_every_query_token_reads_each_shared_block_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = small_problem(rng, use_features=False)
    limits = replace(
        LIMITS, max_entries=int(rng.integers(1, 9)), max_states=int(rng.integers(1, 5))
    )
    forest, batch = batch_of(problem, limits, piece_blocks=int(rng.integers(1, 4)))
    forest.validate()
    assert len(batch.entries) <= limits.max_entries
    assert len(batch.rows) == batch.row_starts[-1] <= limits.max_rows
    starts = problem.query_start_loc.tolist()
    for request, shared in enumerate(batch.shared_tokens.tolist()):
        expected = problem.block_table[request, : shared // problem.block_size].tolist()
        for token in range(starts[request], starts[request + 1]):
            rows = [row for row in batch.states[token].tolist() if row >= 0]
            assert all(batch.rows[row] == token for row in rows)
            entries = [np.searchsorted(batch.row_starts, row, side="right") - 1 for row in rows]
            read: list[int] = []
            for table_row, first, tokens in batch.entries[entries].tolist():
                assert first == len(read)
                blocks = slice(first, first + tokens // problem.block_size)
                read += problem.block_table[table_row, blocks].tolist()
            assert read == expected


def pieces(problem: AttentionProblem, **limits: int) -> list[list[int]]:
    _, batch = batch_of(problem, replace(LIMITS, **limits))
    return batch.entries[:, [FIRST_BLOCK, TOKENS]].tolist()


def test_what_saves_most_is_kept() -> None:
    problem = tree_problem(paths_of_levels([1, 2, 4], [8, 2, 1]) * 2)
    root, middle, leaf = [0, 128], [8, 32], [10, 16]
    assert pieces(problem, max_entries=1) == [root]
    assert pieces(problem, max_entries=4) == [root, middle, middle, leaf]
    assert pieces(problem, max_entries=7) == [root, *2 * [middle, leaf, leaf]]
    assert pieces(problem, max_entries=7, max_states=2) == [root, middle, middle]


def test_long_nodes_are_cut_as_far_as_there_is_room() -> None:
    problem = tree_problem([[("a", 8), ("b", 1)], [("a", 8), ("b", 1)], [("a", 8)]])
    assert pieces(problem, max_states=2) == [[0, 128], [8, 16]]
    assert pieces(problem, max_states=3) == [[0, 64], [4, 64], [8, 16]]
    assert pieces(problem, max_states=4) == [[0, 48], [3, 48], [6, 32], [8, 16]]
    assert pieces(problem, max_states=9) == [[0, 32], [2, 32], [4, 32], [6, 32], [8, 16]]
    assert pieces(problem, max_states=9, max_entries=3) == [[0, 64], [4, 64], [8, 16]]


def test_nothing_shared_leaves_the_tails_as_they_are() -> None:
    problem = tree_problem([[(name, 2)] for name in "abc"])
    expected, _ = problem.expected
    out = solve(problem, batch_of(problem)[1], is_fixed=True)
    assert (out.double() - expected).abs().max() < 0.02


def test_a_step_that_does_not_fit_is_refused() -> None:
    problem = tree_problem([[("a", 2)]] * 3)
    with pytest.raises(ValueError, match=r"\(3, 3, 3\) in a step, expected at most \(8, 256, 2\)"):
        batch_of(problem, replace(LIMITS, max_sharing_tokens=2))


class Recorded:
    """Stands for a kernel, and notes what Triton would compile a variant for."""

    def __init__(self, kernel: Any) -> None:
        self.names, self.seen = kernel.arg_names, set()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **constants: Any) -> None:
            self.seen.add((tuple(map(self.kind, self.names, args)), tuple(constants.items())))

        return launch

    @staticmethod
    def kind(name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.dtype, value.data_ptr() % 16 == 0
        return None if name in NOT_SPECIALIZED else (value == 1, value % 16 == 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("sinks", [False, True])
def test_warming_up_compiles_what_steps_take(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, sinks: bool
) -> None:
    """Whatever their numbers of requests, query tokens and entries."""
    kernels = {name: Recorded(getattr(attention, name)) for name in NODE_KERNELS}
    for name, kernel in kernels.items():
        monkeypatch.setattr(attention, name, kernel)
    NodeBuffers(NodeLimits(1, 1, 1), setup_of(16), max_blocks=1, device="cpu").warm_up(
        4, 32, dtype=torch.float32, query_dtype=dtype, sinks_dtype=torch.float32 if sinks else None
    )
    compiled = {name: set(kernel.seen) for name, kernel in kernels.items()}
    assert all(len(variants) == 1 for variants in compiled.values())
    buffers = NodeBuffers(NodeLimits(37, 50, 41), setup_of(16), max_blocks=5, device="cpu")

    def attended(q: torch.Tensor, **arguments: Any) -> tuple[None, torch.Tensor]:
        return None, torch.zeros(4, len(q))

    for requests, entries in ((1, 1), (16, 3), (37, 64)):
        out = torch.zeros(requests, 4, 32)
        table = torch.zeros(requests, 7, dtype=torch.int32)
        buffers.write_tables(table, torch.ones(requests, dtype=torch.int32), entries)
        buffers.attend(
            attended, out.to(dtype), out, out, out, NodeShapes(entries, 3 * requests, requests, 64),
            query_start_loc=torch.arange(requests + 1), tails={},
            sinks=torch.zeros(4) if sinks else None,
        )  # fmt: skip
    assert {name: kernel.seen for name, kernel in kernels.items()} == compiled


@given(seed=st.integers(0, 2**32 - 1))
def test_pieces_keep_all_multiprocessors_busy(seed: int) -> None:
    """By a count of tiles, one after the other, in waves of as many as there are."""
    rng = np.random.default_rng(seed)
    problem = small_problem(rng, use_features=False)
    forest, lens = forest_of(problem), np.diff(problem.query_start_loc.numpy())
    group_size, num_kv_heads, num_sms = (int(rng.integers(1, most)) for most in (9, 9, 20))
    # blocks of 16 tokens are too short to be cut: as if they had more
    scale = int(rng.integers(1, 400))
    nodes = forest.nodes.copy()
    nodes[:, [BEGIN_TOKENS, END_TOKENS]] *= scale
    scaled = replace(forest, nodes=nodes)

    def tiles_of(piece_tokens: int) -> tuple[list[int], int]:
        tiles, states = [], 0
        for node in nodes.tolist():
            tokens, members = node[END_TOKENS] - node[BEGIN_TOKENS], slice(node[FIRST], node[LAST])
            rows = int(lens[forest.order[members]].sum()) * group_size
            pieces = min(max(tokens // piece_tokens, 1), MAX_STATES)
            tiles += [-(-tokens // pieces)] * (-(-rows // FLASH_ROWS) * num_kv_heads * pieces)
            states += rows * pieces * num_kv_heads
        return sorted(tiles, reverse=True), states

    def cost(piece_tokens: int) -> float:
        tiles, states = tiles_of(piece_tokens)
        return sum(tiles[::num_sms]) + STATE_TOKENS * states

    setup = NodeSetup(problem.block_size, group_size, num_kv_heads, num_sms)
    found = balanced_piece_tokens(scaled, lens, setup)
    load = sum(tiles_of(1 << 30)[0])
    wanted = [max(load // (num_sms * waves), MIN_PIECE_TOKENS) for waves in range(1, MAX_WAVES + 1)]
    assert found in wanted
    assert cost(found) <= min(map(cost, wanted)) + 1e-6


class FakeStream:
    """Writes down what it is told to wait for, and when it is the current one."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.mark.parametrize("is_captured", [False, True])
def test_nodes_are_a_branch_of_a_graph_that_is_captured(
    monkeypatch: pytest.MonkeyPatch, is_captured: bool
) -> None:
    log: list[str] = []

    @contextmanager
    def current(stream: FakeStream) -> Iterator[None]:
        log.append(f"on {stream.name}")
        yield
        log.append("on main")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream("branch", log))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: FakeStream("main", log))
    monkeypatch.setattr(torch.cuda, "stream", current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_captured)
    calls = partial(log.append, "nodes"), partial(log.append, "tails")
    Branch("cuda").both(*calls)
    branched = [
        "branch waits for main", "on branch", "nodes", "on main", "tails", "main waits for branch"
    ]  # fmt: skip
    assert log == (branched if is_captured else ["nodes", "tails"])

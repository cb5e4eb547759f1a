# SPDX-License-Identifier: Apache-2.0
"""Cascades of others, with twins of what they call: the arguments are those of the batch."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.attention.batches import Batch, shared_prefix
from benchmarks.cuda import part_nodes
from benchmarks.cuda.baselines import FlashAttention3, TritonUnified, Unsupported
from benchmarks.cuda.cascades import FlashAttention3Cascade, FlashInferCascade, shared_blocks
from benchmarks.cuda.clock import Clock
from benchmarks.cuda.device import Interpreter
from benchmarks.cuda.forests import shuffled
from benchmarks.cuda.geometry import Ceilings, Features, Geometry
from benchmarks.cuda.inputs import DeviceBatch, Inputs, KvPool
from benchmarks.cuda.limits import planner_limits
from benchmarks.cuda.result import CudaResult
from benchmarks.cuda.rivals import Rivals
from benchmarks.cuda.run import Run
from benchmarks.cuda.stand_ins import load_op
from benchmarks.support.timing import Timing
from tests.attention_backends import triton_interpreter as triton_interpreter
from tests.attention_backends.flash_twin import flash_attn_varlen_func

GEOMETRY = Geometry(4, 2, 32)


def ragged(prefix_blocks: int = 5) -> Batch:
    """Decodes, drafts that are verified and a chunk of a prompt, of different lengths; rows begin
    alike for one block more, which the shortest request has not computed."""
    own_tokens, query_lens = [17, 32, 3, 70], [1, 4, 2, 20]
    seq_lens = np.array(own_tokens, np.int32) + prefix_blocks * GEOMETRY.block_size
    table = np.zeros((4, prefix_blocks + 5), np.int32)
    table[:, : prefix_blocks + 1] = np.arange(1, prefix_blocks + 2)
    table[:, prefix_blocks + 1 :] = np.arange(prefix_blocks + 2, prefix_blocks + 18).reshape(4, 4)
    return Batch(
        block_table=table,
        query_start_loc=np.append(0, np.cumsum(query_lens)).astype(np.int32),
        seq_lens=seq_lens,
        block_size=GEOMETRY.block_size,
        description="ragged",
    )


BATCHES = [
    shuffled(shared_prefix(5, 640, 40, GEOMETRY.block_size)),
    shuffled(shared_prefix(1, 64, 1, GEOMETRY.block_size)),
    shuffled(shared_prefix(3, 70, 26, GEOMETRY.block_size)),
    ragged(),
]


def inputs_of(batch: Batch) -> Inputs:
    limits = planner_limits(requests=16, tokens=32, seq_len=2048)
    cache = KvPool(1 << 22, "cpu").cache(GEOMETRY, batch.num_blocks)
    return Inputs.of(DeviceBatch.upload(batch, limits, "cpu"), GEOMETRY, cache)


def merge_attn_states() -> Any:
    folder = Path(TritonUnified.installed_path()).parent
    return load_op(folder / FlashAttention3Cascade.MERGE).merge_attn_states


def expected_of(inputs: Inputs) -> torch.Tensor:
    key, value = inputs.keys_and_values()
    batch = inputs.batch
    return flash_attn_varlen_func(
        inputs.query.double(), key, value, batch.max_query_len, batch.query_start_loc,
        batch.max_seq_len, batch.seq_lens, batch.block_table, GEOMETRY.scale, causal=True,
    )  # fmt: skip


def assert_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    assert out.dtype == torch.bfloat16 and expected.abs().max() > 0.1
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: batch.description)
def test_flash_attention_cascade_is_the_attention_of_the_batch(batch: Batch) -> None:
    inputs = inputs_of(batch)
    scheduled: list[bool] = []

    def schedule(**arguments: Any) -> None:
        scheduled.append(arguments["causal"])

    flash: Any = SimpleNamespace(varlen=flash_attn_varlen_func, schedule=schedule)
    call = FlashAttention3Cascade(flash, merge_attn_states()).prepare(inputs)
    assert scheduled == [False, True]
    assert_close(call(), expected_of(inputs))


class TwinWrapper:
    """FlashInfer's wrapper in float64, from what its documentation says of the tables."""

    def __init__(self, num_levels: int, workspace: torch.Tensor, kv_layout: str) -> None:
        assert workspace.dtype == torch.uint8 and kv_layout == "HND"
        self._batch_prefill_wrappers = [SimpleNamespace(_backend="auto") for _ in range(num_levels)]

    def plan(
        self, query_starts: Any, page_starts: Any, pages: Any, last_page_tokens: Any,
        num_heads: int, num_kv_heads: int, head_size: int, page_size: int, **options: Any,
    ) -> None:  # fmt: skip
        assert (num_heads, num_kv_heads, head_size) == (4, 2, 32)
        assert options["q_data_type"] == options["kv_data_type"] == torch.bfloat16
        self.causal, self.scale, self.page_size = options["causal"], options["sm_scale"], page_size
        self.levels = list(zip(query_starts, page_starts, pages, last_page_tokens, strict=True))
        assert all(table.dtype == torch.int32 for level in self.levels for table in level)

    def run(self, query: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Over all levels at once: their log-sum-exps need no merge."""
        scores, values = [[[] for _ in query] for _ in range(2)]
        for number, (query_starts, page_starts, pages, last_page_tokens) in enumerate(self.levels):
            assert page_starts[-1] == len(pages) and query_starts[-1] == len(query)
            assert (last_page_tokens >= 1).all() and (last_page_tokens <= self.page_size).all()
            is_causal = self.causal and number == len(self.levels) - 1
            for entry, last in enumerate(last_page_tokens.tolist()):
                own = pages[page_starts[entry] : page_starts[entry + 1]].long()
                num_keys = (len(own) - 1) * self.page_size + last
                key, value = (
                    cache[own].transpose(1, 2).flatten(0, 1)[:num_keys].double() for cache in caches
                )
                first, end = query_starts[entry : entry + 2].tolist()
                for row in range(first, end):
                    seen = num_keys - (end - 1 - row) * is_causal
                    scores[row].append(
                        torch.einsum(
                            "hgd,khd->hgk", query[row].double().unflatten(0, (2, 2)), key[:seen]
                        )
                    )
                    values[row].append(value[:seen])
        rows = [
            torch.einsum(
                "hgk,khd->hgd", (torch.cat(row, 2) * self.scale).softmax(2), torch.cat(seen)
            ).flatten(0, 1)
            for row, seen in zip(scores, values, strict=True)
        ]
        return torch.stack(rows).to(query.dtype)


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: batch.description)
def test_flashinfer_cascade_is_the_attention_of_the_batch(batch: Batch) -> None:
    inputs = inputs_of(batch)
    flashinfer = SimpleNamespace(MultiLevelCascadeAttentionWrapper=TwinWrapper)
    cascade = FlashInferCascade(flashinfer, ("fa3", "fa2"))
    call = cascade.prepare(inputs)
    assert_close(call(), expected_of(inputs))
    levels = cascade._wrapper._batch_prefill_wrappers
    assert [level._backend for level in levels] == ["fa3", "fa2"]
    planned = cascade._wrapper.levels
    assert [len(pages) for _, _, pages, _ in planned][0] == shared_blocks(batch)


def test_one_wrapper_of_flashinfer_is_planned_again() -> None:
    cascade = FlashInferCascade(
        SimpleNamespace(MultiLevelCascadeAttentionWrapper=TwinWrapper), ("auto", "auto")
    )
    for batch in BATCHES:
        inputs = inputs_of(batch)
        assert_close(cascade.prepare(inputs)(), expected_of(inputs))


def test_what_requests_have_not_computed_is_not_shared() -> None:
    assert shared_blocks(ragged()) == 5
    alone = shared_prefix(1, 64, 0, GEOMETRY.block_size)
    assert shared_blocks(alone) == 3  # the last token is a query
    apart = shared_prefix(3, 64, 40, GEOMETRY.block_size)
    apart.block_table[0, 1] = 0  # what is alike again behind it has other tokens before it
    assert shared_blocks(apart) == 1
    with pytest.raises(Unsupported, match="no prefix"):
        shared_blocks(shared_prefix(3, 0, 40, GEOMETRY.block_size))


def test_other_features_are_refused() -> None:
    inputs = inputs_of(BATCHES[0])
    inputs.features = Features(sliding_window=16)
    flash: Any = SimpleNamespace()
    cascades: list[Any] = [
        FlashAttention3Cascade(flash, print),
        FlashInferCascade(flash, ("fa2", "fa2")),
    ]
    for cascade in cascades:
        with pytest.raises(Unsupported, match="plain attention only"):
            cascade.prepare(inputs)


class TwinFlash(FlashAttention3):
    def schedule(self, **arguments: Any) -> None:
        return None

    def varlen(self, left_sms: int = 0, **arguments: Any) -> Any:
        arguments.pop("window_tokens", None)
        return flash_attn_varlen_func(**arguments)


class TwinDevice(Interpreter):
    """Knows how long everything takes."""

    TIMES_US = {
        "FlashAttention 3 over nodes": 10, "FA3 cascade": 20, "FlashInfer cascade, auto": 40,
        "FlashInfer cascade, fa2": 15, "FlashInfer cascade, fa3 and fa2": 16,
    }  # fmt: skip

    def __init__(self) -> None:
        pass

    def compare(self, contenders: dict[str, Any], **options: Any) -> dict[str, Timing]:
        return {name: Timing([self.TIMES_US.get(name, 100) * 1e-6]) for name in contenders}


def run_with(merge: Any, wrapper: Any) -> Run:
    device: Any = TwinDevice()
    rivals = Rivals(device, unified_attention=None, fa3=None, installed=False)
    flash = TwinFlash(None)
    rivals.found[flash.name] = flash
    rivals.cascades[FlashAttention3Cascade.name] = FlashAttention3Cascade(flash, merge)
    for backends in FlashInferCascade.BACKENDS:
        module = SimpleNamespace(MultiLevelCascadeAttentionWrapper=wrapper)
        rivals.cascades[FlashInferCascade.name(backends)] = FlashInferCascade(module, backends)
    rivals.states |= dict.fromkeys(rivals.cascades, "found")
    result = CudaResult(measured=True, json_path=None, markdown_path=None)
    result.begin_part("nodes", "", 1e9)
    clock = Clock(1e9, time.time())
    clock.allow(1e9)
    no_compiler: Any = None
    return Run(device, clock, result, no_compiler, rivals, "tiny", Ceilings(1e12, 1e12))


def nodes_part(run: Run) -> dict[str, Any]:
    part_nodes.measure(run)
    part: dict[str, Any] = run.result.data["parts"]["nodes"]
    assert not part["findings"]
    return part


def test_nodes_are_timed_beside_cascades() -> None:
    part = nodes_part(run_with(merge_attn_states(), TwinWrapper))
    (row,) = part["tables"][0]["rows"]
    assert row["FA3 cascade us"] == pytest.approx(20)
    assert row["FlashInfer cascade us"] == pytest.approx(15)
    assert row["fastest of FlashInfer"] == "fa2"
    goals = {goal["what"]: (goal["value"], goal["met"]) for goal in part["goals"]}
    assert goals["the better cascade of others over nodes"] == (pytest.approx(1.5), True)
    assert goals["FA3 cascade over nodes"] == (pytest.approx(2), True)
    assert goals["FlashInfer cascade over nodes"] == (pytest.approx(1.5), True)
    assert not part["left_out"]


def test_cascades_that_fail_or_are_wrong_are_left_out_and_nodes_are_timed() -> None:
    def no_merge(*arguments: Any) -> None:
        arguments[0].zero_()

    class Failing(TwinWrapper):
        def run(self, *arguments: Any) -> torch.Tensor:
            if self._batch_prefill_wrappers[0]._backend == "fa3":
                return super().run(*arguments)
            raise RuntimeError("no kernel image")

    part = nodes_part(run_with(no_merge, Failing))
    (row,) = part["tables"][0]["rows"]
    assert row["FA3 cascade us"] is None
    assert row["FlashInfer cascade us"] == pytest.approx(16)
    assert row["fastest of FlashInfer"] == "fa3 and fa2"
    wrong, *failed = part["left_out"]
    assert wrong.startswith("FA3 cascade: found, but differs from relay by 1 of")
    assert [reason.partition(":")[0] for reason in failed] == [
        "FlashInfer cascade, auto",
        "FlashInfer cascade, fa2",
    ]
    assert all("no kernel image" in reason for reason in failed)


def test_what_is_not_looked_for_is_left_out_with_its_reason() -> None:
    run = run_with(merge_attn_states(), TwinWrapper)
    run.rivals.cascades.clear()
    run.rivals.states |= dict.fromkeys(
        Rivals(run.device, unified_attention=None, fa3=None, installed=False).states, "not there"
    )
    part = nodes_part(run)
    (row,) = part["tables"][0]["rows"]
    assert (row["FlashInfer cascade us"], row["fastest of FlashInfer"]) == (None, "none")
    assert part["left_out"] == [
        f"{name}: not there" for name in TwinDevice.TIMES_US if "cascade" in name
    ]
    values = {goal["what"]: goal["value"] for goal in part["goals"]}
    assert values["the better cascade of others over nodes"] is None

# SPDX-License-Identifier: Apache-2.0
"""RELAY_SPARSE for CUDA as vLLM drives it: Triton's kernels in the interpreter, and copies that
arrive when somebody waits for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tests.attention_backends.fake_device import fake_device
from tests.attention_backends.sparse_cuda_worker import CudaWorker
from tests.attention_backends.sparse_worker import readings
from vllm_relay.attention_backends.cuda import relay as relay_cuda
from vllm_relay.attention_backends.cuda import relay_stock
from vllm_relay.attention_backends.sparse import common, cuda, cuda_stock
from vllm_relay.long_context.host import device_copies, host_sequence, mirroring
from vllm_relay.long_context.host.host_attention import attend_retrieved
from vllm_relay.long_context.host.sequence_context import SequenceContext
from vllm_relay.long_context.scheduling.kv_cache_spec import RelaySparseSpec
from vllm_relay.sparse.contexts.train_queries import TrainQueries
from vllm_relay.sparse.files.damage import IndexDamagedError

pytestmark = pytest.mark.skipif(
    not current_platform.is_cpu(), reason="a fake GPU, for where there is none"
)


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> None:
    CudaWorker.begin_process(monkeypatch)


@readings
def test_a_long_prompt_is_computed_in_chunks_and_decoded(options: dict[str, Any]) -> None:
    run = CudaWorker(**options)
    long = run.sequence("long", 300, 190)
    run.step((long, 100))
    run.step((long, 90))
    for _ in range(3):
        run.step((long, 1))
    run.check_copy(long)


@pytest.mark.parametrize(
    ("dtype", "options", "has_stock"),
    [
        (torch.float32, {"alpha": 1e-37}, True),
        (torch.float32, {"alpha": 1e-37}, False),
        (torch.bfloat16, {}, True),
        (torch.bfloat16, {"alpha": 1e-37}, False),
    ],
    ids=["stock", "relay only", "bfloat16 everything, stock", "bfloat16, relay only"],
)
def test_long_short_and_growing_requests(
    dtype: torch.dtype, options: dict[str, Any], has_stock: bool
) -> None:
    run = CudaWorker(dtype, has_stock, **options)
    long = run.sequence("long", 400, 290)
    short, growing = run.sequence("short", 90, 20), run.sequence("growing", 250, 60)
    run.step((long, 200))
    run.step((growing, 60), (long, 90), (short, 20))
    for _ in range(3):
        run.step((growing, 1), (short, 1), (long, 1))
    run.step((long, 7), (growing, 34), (short, 1))  # it is computed again: several tokens
    assert run.long_contexts.requests["growing"].sequence is None
    for _ in range(2):
        run.step((growing, 1), (short, 1), (long, 1))
    run.step((growing, 30), (short, 1), (long, 1))
    run.step((growing, 1), (short, 1), (long, 1))
    run.check_copy(long)
    run.check_copy(growing)
    assert run.long_contexts.requests["short"].sequence is None
    assert bool(run.own(long).segments) == bool(options)
    assert sum(map(bool, long.blocks)) < len(long.blocks) / 2
    assert run.long_contexts.host_seconds > 0


def test_layers_that_read_the_cache_of_another() -> None:
    run = CudaWorker(has_stock=False, has_sharing_layer=True, alpha=1e-37)
    long = run.sequence("long", 300, 190)
    run.step((long, 190))
    run.step((long, 1))
    run.step((long, 1))
    run.check_copy(long)


@pytest.mark.parametrize("num_hits", [2, 7])
def test_tokens_of_hit_blocks_are_copied_from_the_device(
    num_hits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces, of blocks that others get in the next step; no prompt is computed by that."""
    monkeypatch.setattr(mirroring, "GATHERED_TOKENS", 64)
    copied: list[int] = []
    monkeypatch.setattr(host_sequence.EncodingBudget, "copy", lambda self, num: copied.append(num))
    run = CudaWorker(torch.bfloat16, alpha=1e-37)
    first = run.sequence("first", 300, 224)
    run.step((first, 224))
    second = run.sequence("second", 400, 230)
    hit_tokens = num_hits * 32
    second.keys[:hit_tokens] = first.keys[:hit_tokens]
    second.values[:hit_tokens] = first.values[:hit_tokens]
    third = run.sequence("third", 90, 80, like=first)  # stays short
    for sequence, number in ((second, num_hits), (third, 2)):
        sequence.blocks = first.blocks[:number]
        sequence.num_computed_tokens = number * 32
    run.step((second, 230 - hit_tokens), (third, 10))
    run.preempt(first)
    assert run.long_contexts.requests["third"].sequence is None
    run.check_copy(second)
    layers = run.long_contexts.requests["second"].sequence.layers
    assert sum(copied) == hit_tokens * len(layers)


def test_a_request_that_hits_all_of_its_prompt_reads_the_host_at_once() -> None:
    """It was preempted, and what the host had of it was dropped: its first step retrieves."""
    run = CudaWorker(alpha=1e-37)
    first = run.sequence("first", 300, 256)
    run.step((first, 256))
    same = run.sequence("same", 300, 120, like=first)
    same.blocks, same.num_computed_tokens = list(first.blocks), 256
    run.step((same, 1))
    run.step((same, 1), (first, 1))
    run.check_copy(same)


@readings
@pytest.mark.parametrize("num_tokens", [225, 256], ids=["one", "none"])
def test_a_resumed_request_gets_the_first_tokens_of_its_block_back(
    options: dict[str, Any], num_tokens: int
) -> None:
    run = CudaWorker(**options)
    long, other = run.sequence("long", 400, 224), run.sequence("other", 400, 220)
    run.step((long, 224), (other, 60))
    run.step((long, num_tokens - 224), (other, 1))
    run.preempt(long)
    run.step((other, 1))
    placement = run.resume(long)
    run.step((other, 1), (long, 1), placed={"long": placement})
    run.step((long, 1), (other, 1))
    run.check_copy(long)


@pytest.mark.parametrize("has_stock", [True, False], ids=["stock", "relay only"])
def test_a_prompt_goes_on_behind_tokens_of_the_host(has_stock: bool) -> None:
    """It was preempted in the middle: its tokens attend to the host's, in chunks."""
    run = CudaWorker(has_stock=has_stock, alpha=1e-37)
    long, other = run.sequence("long", 400, 300), run.sequence("other", 400, 220)
    run.step((long, 140))
    run.preempt(long)
    run.step((other, 100))
    placement = run.resume(long)
    run.step((long, 19), (other, 30), placed={"long": placement})
    run.step((long, 141), (other, 1))
    run.step((other, 1), (long, 1))
    run.check_copy(long)


class Contexts:
    """Those of a worker, ready to be read."""

    num_queued = 0

    def __init__(self, *contexts: Any) -> None:
        self.by_id = {each.id: each for each in contexts}
        self.given_up: set[str] = set()

    def get(self, context_id: str) -> Any:
        return self.by_id.get(context_id)

    def take_changes(self) -> list[Any]:
        return []

    def give_up(self, context_id: str, problem: str) -> None:
        self.given_up.add(context_id)


def test_requests_go_on_behind_a_stored_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """One with a single token, one with a prompt of its own; and when the context is damaged, both
    begin again, while another one goes on."""
    run = CudaWorker(alpha=1e-37, estimate_unread=False)
    first = run.sequence("first", 300, 210)
    run.step((first, 210), kept=("first",))
    run.long_contexts.pending_writes.finish()
    own = run.own(first)
    assert own.train_queries.sample() is not None
    found = run.long_contexts.requests["first"].sequence
    assert found is not None
    context = SequenceContext(np.arange(203), found, ["layer"])
    contexts: Any = Contexts(context)
    run.long_contexts.contexts = contexts
    readers = []
    for name, num_prompt_tokens in (("single", 204), ("prompt", 223)):
        reader = run.sequence(name, 300, num_prompt_tokens)
        reader.keys[:203], reader.values[:203] = first.keys[:203], first.values[:203]
        reader.num_computed_tokens = 203
        readers.append(reader)
    single, prompt = readers
    placed = {each.name: run.resume(each, context.id) for each in readers}
    run.step((prompt, 20), (single, 1), (first, 1), placed=placed)
    for _ in range(2):
        run.step((single, 1), (prompt, 1), (first, 1))
    for each in (*readers, first):
        run.check_copy(each)
    assert run.long_contexts.take_stats().host_retrieved_tokens > 0

    failures = []

    def fails(parts: list[Any], *args: Any) -> None:
        if parts[0].context is not None:
            failures.append(len(parts))
            raise IndexDamagedError("page 3")
        attend_retrieved(parts, *args)

    monkeypatch.setattr(common, "attend_retrieved", fails)
    for _ in range(2):
        run.step((single, 1), (first, 1), (prompt, 1), lost=("single", "prompt"))
    assert failures == [2], "the context was read again"
    assert run.long_contexts.take_stats().lost == dict.fromkeys(("single", "prompt"), context.id)


def test_a_request_whose_context_is_gone_disturbs_no_other() -> None:
    run = CudaWorker(alpha=1e-37)
    contexts: Any = Contexts()
    run.long_contexts.contexts = contexts
    reader, other = run.sequence("reader", 300, 204), run.sequence("other", 300, 190)
    run.step((other, 190))
    reader.num_computed_tokens = 203
    placement = run.resume(reader, "gone")
    run.step((reader, 1), (other, 1), placed={"reader": placement}, lost=("reader",))
    run.step((reader, 1), (other, 1), lost=("reader",))
    run.check_copy(other)
    assert run.long_contexts.take_stats().lost == {"reader": "gone"}


def test_queries_of_kept_requests_are_those_that_train_on_cpus() -> None:
    run = CudaWorker(torch.bfloat16, alpha=0.1, estimate_unread=False)
    first, other = run.sequence("first", 300, 210), run.sequence("other", 300, 210)
    run.step((first, 100), (other, 40), kept=("first", "other"))
    expected = TrainQueries(host_sequence.TRAIN_QUERIES_PER_KEY)
    asked = first.query[:210].unflatten(1, (2, -1)).permute(1, 2, 0, 3)
    expected.add(asked, first_position=0)
    run.step((other, 10), (first, 110))
    run.long_contexts.pending_writes.finish()
    queries = run.own(first).train_queries
    for ours, theirs in (
        (queries.sample(), expected.sample()),
        (queries.last(), expected.last()),
    ):
        assert ours is not None and theirs is not None and torch.equal(ours, theirs)


def test_indexes_that_learn_nothing_need_no_queries() -> None:
    run = CudaWorker(alpha=0.1)
    first = run.sequence("first", 300, 210)
    run.step((first, 210), kept=("first",))
    run.long_contexts.pending_writes.finish()
    assert run.own(first).train_queries.sample() is None


def test_little_pinned_memory_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_copies, "MAX_PENDING_BYTES", 1)
    run = CudaWorker(alpha=1e-37)
    long = run.sequence("long", 300, 190)
    run.step((long, 100))
    run.step((long, 90))
    run.step((long, 1))
    run.check_copy(long)


def test_what_vllm_is_told() -> None:
    run = CudaWorker()
    unused: Any = None
    support = run.builder.get_cudagraph_support(unused, unused)
    assert support == AttentionCGSupport.NEVER
    backend = cuda.RelaySparseCudaBackend
    assert backend.get_name() == "RELAY_SPARSE"
    assert not backend.supports_kv_connector()
    full = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=48, dtype=torch.float32)
    common._config[:] = [
        SimpleNamespace(
            additional_config={"relay": {}},
            model_config=SimpleNamespace(max_model_len=1000),
            max_in_flight_tokens=50,
        )
    ]
    spec = backend.customize_spec(full)
    assert isinstance(spec, RelaySparseSpec) and spec.policy.prefill == "exact_resident"


@pytest.mark.parametrize("name", ["Flash", "Triton"])
def test_prompts_are_left_to_what_relay_leaves_them_to(name: str) -> None:
    sparse = getattr(cuda_stock, f"RelaySparse{name}Backend")
    dense = getattr(relay_stock, f"Relay{name}Backend")
    assert issubclass(sparse, cuda.RelaySparseCudaBackend)
    assert sparse.get_impl_cls().stock_impl_cls is dense.get_impl_cls().stock_impl_cls
    assert sparse.get_builder_cls().stock_builder_cls is dense.get_builder_cls().stock_builder_cls
    assert issubclass(sparse.get_impl_cls(), cuda.RelaySparseCudaImpl)
    assert issubclass(sparse.get_builder_cls(), cuda.RelaySparseCudaMetadataBuilder)


def test_a_run_without_requests_is_planned_as_it_is() -> None:
    """vLLM's dummy runs name no requests."""
    run = CudaWorker()
    sequence = run.sequence("a", 128, 128)
    sequence.blocks = [3, 1, 4, 2]
    with fake_device():
        metadata = run.builder.build(0, run.metadata([(sequence, 0, 128)]))
    assert type(metadata) is relay_cuda.RelayCudaMetadata

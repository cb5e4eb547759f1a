# SPDX-License-Identifier: Apache-2.0
"""What a worker gives to the builders and layers of RELAY beside FlashAttention and FlashInfer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import flash_attn
from vllm.v1.kv_cache_interface import KVCacheLayout

from tests.attention_backends import flash_twin, flashinfer_twin
from tests.attention_backends.strategies import AttentionProblem, error_bounds
from tests.attention_backends.told_blocks import tell
from tests.attention_backends.triton_problems import cuda_cache, paths_of_levels, tree_problem
from vllm_relay.attention_backends.cuda import step_batch
from vllm_relay.attention_backends.cuda.flash import relay as relay_nodes
from vllm_relay.attention_backends.cuda.flash.nodes import CALL_BYTES
from vllm_relay.attention_backends.worker_blocks import WorkerBlocks
from vllm_relay.config import RelayConfig

flashinfer, relay_flashinfer = flashinfer_twin.modules()

HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 4, 2, 32, 16
MAX_REQUESTS, MAX_MODEL_LEN = 12, 640


def layer(**scales: float) -> Any:
    """With what an fp8 cache is scaled by."""
    scales = dict.fromkeys("qkv", 1.0) | scales
    there = {f"_{name}_scale": torch.tensor(scale) for name, scale in scales.items()}
    return SimpleNamespace(
        **there, **{f"_{name}_scale_float": scale for name, scale in scales.items()}
    )


class Worker:
    """The part of a builder that comes from a worker; stands before it among the bases.

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
        fields = {
            "sliding_window": (-1, -1), "alibi_slopes": None, "fa4_hd256": False,
            "logits_soft_cap": None, "num_heads": HEADS,
        } | layer  # fmt: skip
        self.layers = {"layer": SimpleNamespace(impl=SimpleNamespace(**fields))}
        self.layer_names = list(self.layers)
        self.device = torch.device("cpu")
        self.options = RelayConfig()
        self.vllm_config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=MAX_REQUESTS),
            compilation_config=SimpleNamespace(
                static_forward_context=self.layers,
                cudagraph_mode=mode if max_captured else CUDAGraphMode.NONE,
                max_cudagraph_capture_size=max_captured,
            ),
            model_config=SimpleNamespace(max_model_len=MAX_MODEL_LEN),
            num_speculative_tokens=num_drafts,
        )
        # each token that is saved pays
        self.kv_cache_spec = SimpleNamespace(
            unpadded_page_size_bytes=2 * BLOCK_SIZE * CALL_BYTES, block_size=BLOCK_SIZE,
            num_kv_heads=KV_HEADS, head_size=HEAD_SIZE,
        )  # fmt: skip
        self.dcp_world_size = 1
        self.worker_blocks = step_batch.follow_blocks(self.vllm_config)
        self.given(max_captured, num_drafts)

    def given(self, max_captured: int, num_drafts: int) -> None:
        """What the stock builder has."""
        raise NotImplementedError


class FlashAttentionBuilder(Worker, relay_nodes.RelayNodesMetadataBuilder):
    def given(self, max_captured: int, num_drafts: int) -> None:
        self.use_full_cuda_graph, self.max_cudagraph_size = bool(max_captured), max_captured
        self.max_num_splits, self.block_size = 0, BLOCK_SIZE
        self.num_heads_q, self.num_heads_kv, self.headdim = HEADS, KV_HEADS, HEAD_SIZE
        self.aot_schedule, self.aot_sliding_window = False, (-1, -1)
        self.rswa_window = self.mm_prefix_query_ranges_np = self.rswa_prefix_lens = None


class FlashInferBuilder(Worker, relay_flashinfer.RelayFlashInferMetadataBuilder):
    def given(self, max_captured: int, num_drafts: int) -> None:
        self.reorder_batch_threshold, self._num_speculative_tokens = 1 + num_drafts, num_drafts
        self.num_qo_heads, self.num_kv_heads, self.page_size = HEADS, KV_HEADS, BLOCK_SIZE
        self.use_xqa = self.use_trtllm_gen_varlen_decode = self.use_dcp = self.has_sinks = False
        self.use_trtllm_decode_attention = True
        self.flashinfer_trtllm_api_decode_kernel = flashinfer.FlashInferDecodeKernel.TRTLLM_GEN
        self.attention_config = SimpleNamespace(use_trtllm_attention=None)
        self.cache_dtype = "auto"
        self.q_data_type_prefill = self.q_data_type_decode = torch.float32
        self.cache_config = SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBHNC
        )
        self.paged_kv_indptr = SimpleNamespace(gpu=torch.zeros(MAX_REQUESTS + 1).int())


def flash_attention_impl(**fields: Any) -> Any:
    made = object.__new__(relay_nodes.RelayNodesImpl)
    made.head_size, made.num_kv_heads, made.scale = HEAD_SIZE, KV_HEADS, HEAD_SIZE**-0.5
    made.logits_soft_cap, made.sinks = 0, None
    made.vllm_flash_attn_version, made.supports_quant_query_input = 2, False
    made.attn_type, made.dcp_world_size, made.kv_cache_dtype = "decoder", 1, "auto"
    made.sliding_window, made.alibi_slopes, made.fa4_hd256 = (-1, -1), None, False
    vars(made).update(fields)
    return made


def flashinfer_impl(**fields: Any) -> Any:
    made = object.__new__(relay_flashinfer.RelayFlashInferImpl)
    made.head_size, made.num_kv_heads, made.scale = HEAD_SIZE, KV_HEADS, HEAD_SIZE**-0.5
    made.sinks = made.bmm1_scale = made.bmm2_scale = made.o_sf_scale = None
    made.kv_cache_dtype, made.is_kvcache_nvfp4, made.dcp_world_size = "auto", False, 1
    made.window_left, made.need_to_return_lse_for_decode = -1, False
    made._multi_ctas_kv_counter_buffer = None
    vars(made).update(fields)
    return made


@dataclass(frozen=True)
class Kind:
    """RELAY beside one of vLLM's backends."""

    name: str
    builder: Any
    impl: Callable[..., Any]
    stock_metadata: type
    tail_lens: Callable[[Any], list[int]]
    """Of all requests of a step."""
    stand_in: Callable[[Any], None]
    cache: Callable[[AttentionProblem], torch.Tensor] = cuda_cache

    def is_stock(self, metadata: Any) -> bool:
        """Whether a step is the stock backend's."""
        return type(metadata) is self.stock_metadata

    def attend(
        self, inputs: Inputs, metadata: Any, problem: AttentionProblem, **fields: Any
    ) -> torch.Tensor:
        cache = self.cache(problem)
        self.impl(**fields).forward(layer(), inputs.query, None, None, cache, metadata, inputs.out)
        return inputs.out[: len(problem.query)]


FLASH_ATTENTION = Kind(
    "FlashAttention", FlashAttentionBuilder, flash_attention_impl,
    flash_attn.FlashAttentionMetadata,
    lambda metadata: metadata.seq_lens.tolist(),
    flash_twin.stand_in,
)  # fmt: skip
FLASHINFER = Kind(
    "FlashInfer", FlashInferBuilder, flashinfer_impl, flashinfer.FlashInferMetadata,
    lambda metadata: [
        each
        for part in (metadata.decode, metadata.prefill)
        if part is not None
        for each in part.seq_lens.tolist()
    ],
    flashinfer_twin.stand_in,
    lambda problem: cuda_cache(problem).contiguous(),
)  # fmt: skip


class Inputs:
    """The buffers of a model runner, which stay where they are."""

    def __init__(self, num_requests: int, num_tokens: int) -> None:
        self.num_requests, self.num_tokens = num_requests, num_tokens
        self.query_start_loc = torch.zeros(num_requests + 1, dtype=torch.int32)
        self.seq_lens = torch.zeros(num_requests, dtype=torch.int32)
        self.block_table = torch.zeros(num_requests, MAX_MODEL_LEN // BLOCK_SIZE).int()
        self.query = torch.zeros(num_tokens, HEADS, HEAD_SIZE)
        self.out = torch.zeros(num_tokens, HEADS, HEAD_SIZE)

    @staticmethod
    def of(problem: AttentionProblem) -> Inputs:
        inputs = Inputs(problem.num_requests, len(problem.query))
        inputs.fill(problem)
        return inputs

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


def begin(blocks: WorkerBlocks, problem: AttentionProblem) -> None:
    """A step in which all requests of the problem are new."""
    tell(blocks, problem.block_table.numpy(), problem.seq_lens.numpy(), BLOCK_SIZE)


def tree(paths: Any, **keywords: Any) -> AttentionProblem:
    options = {"heads": (HEADS, KV_HEADS), "head_size": HEAD_SIZE, "dtype": torch.float32}
    return tree_problem(paths, **options, **keywords)


def problems(**keywords: Any) -> list[AttentionProblem]:
    """Of different depths: `DEPTHS`."""
    trees: tuple[Any, ...] = (
        paths_of_levels([1, 2, 6], [16, 14, 1]) * 2,
        [[("a", 9)]] * 5 + [[("b", 1)]],
        [[(name, 3)] for name in "abcd"],
        paths_of_levels([1, 5], [20, 1]) * 2,
    )
    return [tree(paths, **keywords) for paths in trees]


DEPTHS = (2, 1, 0, 1)


def check(out: torch.Tensor, problem: AttentionProblem) -> None:
    expected, _ = problem.expected
    bound, _ = error_bounds(problem)
    assert ((out.double() - expected).abs() <= bound).all()


def shared_tokens(builder: Any) -> np.ndarray:
    """int [requests]: of the last step that was planned."""
    planned = builder.plans._planned
    assert planned is not None
    return planned.forest.shared_tokens

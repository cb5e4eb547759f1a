# SPDX-License-Identifier: Apache-2.0
"""Attention of one layer for questions behind a stored context: exact, by three ways.

relay_sparse: over keys and values where the context has them. RELAY: the kernel alone, as in the
prefill of a prompt of which all other tokens are in the KV cache; nothing is written to it. torch:
scaled_dot_product_attention's CPU kernel, one kv head after the other, merged by log-sum-exp.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from benchmarks.support.formatting import Row
from benchmarks.support.timing import Timing, interleaved, ratio
from vllm_relay.attention_backends.cpu import kernels as cpu
from vllm_relay.attention_backends.cpu.unpacked import TokenRun, UnpackedRequest, unpacked_attention
from vllm_relay.attention_backends.ops import merge_states
from vllm_relay.attention_backends.plan import plan_step
from vllm_relay.sparse.contexts.partial_attention import attention_state

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE_TOKENS = 32, 8, 128, 128
SCALE = HEAD_SIZE**-0.5
CHECKED_QUERIES = 4


class Question:
    """The last `num_queries` tokens of a sequence, whose tokens before them are stored.

    Args:
        stored: keys and values [2, kv_heads, tokens, size].
    """

    def __init__(self, stored: torch.Tensor, num_queries: int) -> None:
        generator = torch.Generator().manual_seed(num_queries)
        self.stored, self.num_stored = stored, stored.shape[2]
        self.num_tokens = self.num_stored + num_queries
        shape = (2, NUM_KV_HEADS, num_queries, HEAD_SIZE)
        self.own = torch.randn(shape, generator=generator).to(stored.dtype)
        self.query = torch.randn(num_queries, NUM_HEADS, HEAD_SIZE, generator=generator)
        self.query = self.query.to(stored.dtype)
        self.outputs = {name: torch.empty_like(self.query) for name in ("relay_sparse", "relay")}
        self._fill_cache()

    @property
    def gflop(self) -> float:
        num_queries = len(self.query)
        pairs = num_queries * self.num_stored + num_queries * (num_queries + 1) // 2
        return 4e-9 * NUM_HEADS * HEAD_SIZE * pairs

    def _fill_cache(self) -> None:
        num_blocks = -(-self.num_tokens // BLOCK_SIZE_TOKENS)
        shape = (num_blocks, NUM_KV_HEADS, BLOCK_SIZE_TOKENS, 2 * HEAD_SIZE)
        self.cache = torch.zeros(shape, dtype=self.stored.dtype)
        for part, begin in ((self.stored, 0), (self.own, self.num_stored)):
            keys, values = part.transpose(1, 2)
            cpu.write_kv_cache(keys, values, self.cache, begin + torch.arange(len(keys)))
        self.block_table = torch.arange(num_blocks, dtype=torch.int32)[None]
        self.plan = plan_step(
            self.block_table.numpy(),
            np.array([0, len(self.query)], np.int32),
            np.array([self.num_tokens], np.int32),
            block_size=BLOCK_SIZE_TOKENS,
            num_heads=NUM_HEADS,
            num_kv_heads=NUM_KV_HEADS,
            head_size=HEAD_SIZE,
            num_threads=torch.get_num_threads(),
            kernel=cpu.kernel_for(self.stored.dtype),
            forest=None,
        )

    def relay_sparse(self) -> None:
        runs = [
            TokenRun(begin, end, keys.unbind(), values.unbind())
            for begin, end, (keys, values) in (
                (0, self.num_stored, self.stored),
                (self.num_stored, self.num_tokens, self.own),
            )
        ]
        request = UnpackedRequest(0, len(self.query), 0, self.num_tokens, runs, is_causal=True)
        unpacked_attention(
            self.query, [request], self.outputs["relay_sparse"], None,
            scale=SCALE, num_kv_heads=NUM_KV_HEADS,
        )  # fmt: skip

    def relay(self) -> None:
        cpu.relay_attention(
            self.query, self.cache, self.block_table, self.plan, self.outputs["relay"],
            scale=SCALE, num_kv_heads=NUM_KV_HEADS,
        )  # fmt: skip

    def torch(self) -> None:
        """Rows [kv_heads, group * tokens, size]; the question's own tokens with causal masks."""
        query = self.query.unflatten(1, (NUM_KV_HEADS, -1)).permute(1, 2, 0, 3)
        rows = query.flatten(1, 2)
        states = [
            attention_state(rows[head, None], *self.stored[:, head, None], SCALE)
            for head in range(NUM_KV_HEADS)
        ]
        outputs, lses = zip(*states, strict=True)
        own = self.own.repeat_interleave(query.shape[1], 1)
        own_output, own_lse = attention_state(query.flatten(0, 1), *own, SCALE, causal=True)
        of_own = own_output.reshape(rows.shape), own_lse.reshape(rows.shape[:2])
        merged, _ = merge_states(torch.cat(outputs), torch.cat(lses), *of_own)
        self.outputs["torch"] = merged.reshape(query.shape).permute(2, 0, 1, 3).flatten(1, 2)

    def error(self, name: str) -> float:
        """The relative L2 error of some query tokens of the first kv head, against float64."""
        keys, values = torch.cat((self.stored[:, 0], self.own[:, 0]), 1).double()
        at = torch.linspace(0, len(self.query) - 1, CHECKED_QUERIES).long()
        heads = slice(0, NUM_HEADS // NUM_KV_HEADS)
        scores = self.query[at, heads].double() @ keys.T * SCALE
        hidden = torch.arange(self.num_tokens) > (self.num_stored + at)[:, None, None]
        expected = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values
        found = self.outputs[name][at, heads].double()
        return float((found - expected).norm() / expected.norm())


def measure_questions(
    options: argparse.Namespace, num_stored: int, lengths: list[int]
) -> tuple[list[Row], list[float]]:
    """A row for each length, and the rates over that of the kernel."""
    generator = torch.Generator().manual_seed(0)
    stored = torch.empty(2, NUM_KV_HEADS, num_stored, HEAD_SIZE, dtype=torch.bfloat16)
    for part in stored.flatten(0, 1):
        part.copy_(torch.randn(part.shape, generator=generator))
    rows: list[Row] = []
    shares = []
    for length in lengths:
        question = Question(stored, length)
        contenders = {
            "torch": question.torch,
            "relay": question.relay,
            "relay_sparse": question.relay_sparse,
        }
        found: dict[str, Timing] = interleaved(contenders, options.rounds)
        assert torch.equal(question.outputs["relay"], question.outputs["relay_sparse"])
        shares.append(ratio(found["relay"], found["relay_sparse"]))
        rows.append(
            {"stored tokens": num_stored, "question tokens": length}
            | {f"{name} ms": timing.median_ms for name, timing in found.items()}
            | {
                "spread": max(timing.spread for timing in found.values()),
                "GFLOP/s": question.gflop / found["relay_sparse"].median_s,
                "tokens/s": length / found["relay_sparse"].median_s,
                "of relay's rate": shares[-1],
                "times as fast as torch": ratio(found["torch"], found["relay_sparse"]),
                "error": question.error("relay_sparse"),
                "torch's error": question.error("torch"),
            }
        )
    return rows, shares

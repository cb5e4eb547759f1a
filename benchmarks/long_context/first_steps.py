# SPDX-License-Identifier: Apache-2.0
"""How long others wait when a long request begins to generate.

Behind a stored context: whole steps of an engine in which short requests decode, before the long
one comes and from then on. Computed by itself: what the host does in one layer, without an engine,
when the last chunk of the prompt is written and in the steps of its first tokens.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch

from benchmarks.long_context.corpus_model import HEAD_SIZE, Geometry
from benchmarks.sparse.heads.corpus import Head
from benchmarks.support.decoding import add_request, exactly
from benchmarks.support.formatting import Row
from vllm_relay.long_context.host.host_attention import HostPart, Retrieval, attend_retrieved
from vllm_relay.long_context.host.host_sequence import EncodingBudget, HostLayer, SequencePlace
from vllm_relay.long_context.window import Residency
from vllm_relay.sparse.contexts.retrieval import SessionStats
from vllm_relay.sparse.index.query_types import Dipr
from vllm_relay.sparse.plan.options import DBOptions

NUM_OTHERS, OTHER_TOKENS = 4, 64
STEPS_BEFORE, STEPS_SINCE = 8, 40
CHUNK_TOKENS, SINK_TOKENS, WINDOW_TOKENS = 2048, 64, 256
ALPHA = 2e-4


def behind_context(llm_engine: Any, tokens: list[int]) -> Row:
    """Args: tokens: of a stored context."""
    output_tokens = STEPS_BEFORE + STEPS_SINCE + NUM_OTHERS + 1
    for number in range(NUM_OTHERS):
        others = [4 + number] + [3 + i * 7 % 250 for i in range(OTHER_TOKENS)]
        add_request(llm_engine, others, exactly(output_tokens))
    for _ in range(NUM_OTHERS):
        llm_engine.step()
    before_s = [_step_s(llm_engine) for _ in range(STEPS_BEFORE)]
    began_s = time.perf_counter()
    add_request(llm_engine, [*tokens, 5], exactly(STEPS_SINCE - 2))
    added_s = time.perf_counter() - began_s
    since_s = [_step_s(llm_engine) for _ in range(STEPS_SINCE)]
    while llm_engine.has_unfinished_requests():
        llm_engine.step()
    return {
        "context tokens": len(tokens),
        "step before, ms": statistics.median(before_s) * 1e3,
        "adding it, ms": added_s * 1e3,
        "first step, ms": since_s[0] * 1e3,
        "second step, ms": since_s[1] * 1e3,
        "others, median ms": statistics.median(since_s[2:]) * 1e3,
        "longest, ms": max(since_s) * 1e3,
        "which": int(np.argmax(since_s)) + 1,
    }


def computed_by_itself(
    geometry: Geometry, heads: list[Head], chunk_tokens: int = CHUNK_TOKENS
) -> Row:
    """One layer, whose keys and values are the heads'.

    Args:
        chunk_tokens: written at once; the whole prompt where others have computed its blocks.
    """
    num_tokens, steps = len(heads[0].keys) - STEPS_SINCE, STEPS_SINCE
    at = [i % len(heads) for i in range(geometry.num_kv_heads)]
    keys, values = (
        torch.stack([torch.from_numpy(getattr(heads[h], part)) for h in at], 1).bfloat16()
        for part in ("keys", "values")
    )  # [tokens, kv_heads, size]
    queries = torch.from_numpy(np.concatenate([heads[h].queries[:steps] for h in at], 1))
    place = SequencePlace(0, num_tokens + steps, SINK_TOKENS, WINDOW_TOKENS, num_tokens)
    budget = EncodingBudget()
    layer = HostLayer(place, geometry.num_kv_heads, HEAD_SIZE, torch.bfloat16, budget=budget)
    chunks_s = []
    for begin in range(0, num_tokens, chunk_tokens):
        end = min(begin + chunk_tokens, num_tokens)
        began_s = time.perf_counter()
        budget.renew()
        is_copied = end - begin > CHUNK_TOKENS
        layer.write(begin, keys[begin:end], values[begin:end], is_copied=is_copied)
        chunks_s.append(time.perf_counter() - began_s)
    scale = HEAD_SIZE**-0.5
    query = Dipr(alpha=ALPHA, scale=scale, estimate=True)
    retrieval = Retrieval(query, DBOptions(query=query, index="flat"), scale)
    taken_s = []
    for step in range(steps):
        end = num_tokens + step + 1
        began_s = time.perf_counter()
        budget.renew()
        layer.write(end - 1, keys[end - 1 : end], values[end - 1 : end])
        window_begin = (end - WINDOW_TOKENS) // 128 * 128
        part = HostPart(layer, None, 0, Residency(128, window_begin), end)
        asked = queries[step : step + 1].bfloat16()
        output = torch.zeros_like(asked)
        lse = torch.full(asked.shape[:2], -torch.inf)
        attend_retrieved([part], [0], asked, output, lse, retrieval, SessionStats())
        taken_s.append(time.perf_counter() - began_s)
    return {
        "prompt tokens": num_tokens,
        "chunk tokens": min(chunk_tokens, num_tokens),
        "chunk, median ms": statistics.median(chunks_s) * 1e3,
        "longest chunk, ms": max(chunks_s) * 1e3,
        "last chunk, ms": chunks_s[-1] * 1e3,
        "first token, ms": taken_s[0] * 1e3,
        "tokens, median ms": statistics.median(taken_s) * 1e3,
        "longest token, ms": max(taken_s) * 1e3,
        "which": int(np.argmax(taken_s)) + 1,
    }


def _step_s(llm_engine: Any) -> float:
    began_s = time.perf_counter()
    llm_engine.step()
    return time.perf_counter() - began_s

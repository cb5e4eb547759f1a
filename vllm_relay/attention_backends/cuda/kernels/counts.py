# SPDX-License-Identifier: Apache-2.0
"""What the kernels that plan a step count, and where."""

from __future__ import annotations

import triton.language as tl

from vllm_relay.attention_backends.cuda import plan as gpu_plan

# counts, int32; the first two are those of `PlanTensors`
NUM_LARGE: tl.constexpr = tl.constexpr(gpu_plan.NUM_LARGE_ITEMS)
NUM_SMALL: tl.constexpr = tl.constexpr(gpu_plan.NUM_SMALL_ITEMS)
NUM_MEMBERS: tl.constexpr = tl.constexpr(2)
NUM_SLOTS: tl.constexpr = tl.constexpr(3)
SECTION_ITEMS: tl.constexpr = tl.constexpr(4)
SECTION_SLOTS: tl.constexpr = tl.constexpr(5)
SEGMENT_ITEMS: tl.constexpr = tl.constexpr(6)
SEGMENT_SLOTS: tl.constexpr = tl.constexpr(7)
NUM_REQUESTS: tl.constexpr = tl.constexpr(8)
NUM_SHARING: tl.constexpr = tl.constexpr(9)
NUM_GROUPS: tl.constexpr = tl.constexpr(10)
MAX_CHAIN: tl.constexpr = tl.constexpr(11)
TOKENS: tl.constexpr = tl.constexpr(12)
TOKENS_SAVED: tl.constexpr = tl.constexpr(13)
EPOCH: tl.constexpr = tl.constexpr(14)
"""Not of a step: counts the steps."""
NUM_COUNTS = 16

# totals, int64: summed over all steps, but for the last two
TOTAL_STEPS, TOTAL_REQUESTS, TOTAL_SHARING, TOTAL_TOKENS, TOTAL_TOKENS_SAVED = range(5)
LAST_GROUPS, LAST_DEPTH = 5, 6
NUM_TOTALS = 8

STEP_NUMBERS = [
    "num_requests", "num_blocks", "max_tokens", "max_members", "max_query_len", "max_items",
    "max_slots", "num_kv_heads", "num_programs", "window", "min_shared_tokens", "table_stride",
    "hashes_stride", "positions_stride", "is_counted",
]  # fmt: skip
"""Arguments for whose values, 1 or multiples of 16, nothing is compiled anew in the middle of
serving."""

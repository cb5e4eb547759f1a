# SPDX-License-Identifier: Apache-2.0
"""Sizes of planner buffers that let many batches share one compilation.

Triton compiles a kernel anew where an integer argument is or is not a multiple of 16, or is 1: all
strides and sizes here are multiples of 16.
"""

from vllm_relay.attention_backends.cuda.plans.planner import PlannerLimits

ALIGNED = 16


def aligned(number: int, to: int = ALIGNED) -> int:
    return -(-number // to) * to


def planner_limits(*, requests: int, tokens: int, seq_len: int) -> PlannerLimits:
    """Limits of at least these sizes. Blocks are of up to 128 tokens, hence the 2,048."""
    return PlannerLimits(
        max_requests=aligned(requests),
        max_tokens=aligned(tokens),
        max_seq_len=aligned(seq_len, 2048),
    )


def table_width(limits: PlannerLimits, block_size: int) -> int:
    """Columns of a block table."""
    return aligned(limits.max_seq_len // block_size)


def standard_limits() -> PlannerLimits:
    """For all that is timed: 1,024 requests of up to 34,816 tokens."""
    return planner_limits(requests=1024, tokens=1024, seq_len=34816)

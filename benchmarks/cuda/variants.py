# SPDX-License-Identifier: Apache-2.0
"""The ways in which a run calls the kernels."""

from dataclasses import dataclass

from benchmarks.cuda.geometry import PLAIN, Features, Geometry
from vllm_relay.attention_backends.cuda.config import KernelConfig
from vllm_relay.attention_backends.cuda.plans.planner import PlannerLimits


@dataclass(frozen=True)
class Variant:
    """One way in which the kernels are called."""

    geometry: Geometry
    config: KernelConfig
    limits: PlannerLimits
    features: Features = PLAIN
    has_lse: bool = False
    max_query_lens: tuple[int, ...] = (1,)
    rivals: bool = True
    """Also what the rival that is written in Triton compiles."""

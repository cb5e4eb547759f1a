# SPDX-License-Identifier: Apache-2.0
"""What an engine of vLLM needs inside an actor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_PARALLEL_SIZES = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
)


def fit_into_actor(options: dict[str, Any], sizes: Mapping[str, Any]) -> int:
    """Let an engine that takes several GPUs start its own processes for them.

    Args:
        options: of vLLM; an executor is added where there are several GPUs and none is given.
        sizes: vLLM's parallel sizes by their options; 1 for what is missing or None.

    Returns:
        The number of GPUs of the engine.
    """
    num_gpus = math.prod(sizes.get(name) or 1 for name in _PARALLEL_SIZES)
    if num_gpus > 1:
        # not Ray's, which vLLM may choose inside an actor
        options.setdefault("distributed_executor_backend", "mp")
    return num_gpus

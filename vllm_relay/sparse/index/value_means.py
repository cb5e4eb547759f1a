# SPDX-License-Identifier: Apache-2.0
"""Means of neighbouring values: what stands for tokens that attention does not read one by one."""

from __future__ import annotations

import numpy as np

from vllm_relay import _C
from vllm_relay.sparse.index.elements import DTYPES, Elements

MEAN_TOKENS = _C.index.MEAN_KEYS
"""Adjacent tokens whose values have one mean."""


def value_means(values: Elements, threads: int) -> Elements:
    """
    Args:
        values: [n, value_size].

    Returns:
        [ceil(n / MEAN_TOKENS), value_size], of the same dtype; the last one may be of fewer tokens.
    """
    n, size = values.shape
    means = np.empty((-(-n // MEAN_TOKENS), size), values.data.dtype)
    _C.index.mean_rows("auto", values.data, DTYPES.index(values.dtype), means, threads)
    return Elements(means, values.dtype)

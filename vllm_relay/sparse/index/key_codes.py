# SPDX-License-Identifier: Apache-2.0
"""Keys in eight bits: centred, one step size per dimension, so that products of codes compare as
whole numbers.  Softmax does not see the centre: it adds the same to every score of a query."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from vllm_relay import _C
from vllm_relay._C import PageGuard
from vllm_relay.sparse.files.aligned import aligned_empty
from vllm_relay.sparse.files.damage import IndexDamagedError, require
from vllm_relay.sparse.index.elements import DTYPES, STORAGE, Elements, check_finite

ROW_BYTES_MULTIPLE = 64
BLOCK_KEYS = 16
MAX_HEAD_SIZE = 256
MAX_OUTSIDE = 64
MAX_MAGNITUDE = 1e38
SMALLEST_STEP = np.finfo(np.float32).tiny
_SAMPLE_KEYS = 1024
_DEVIATIONS = 6.0


@dataclass(frozen=True)
class KeyCodes:
    """How keys became codes.

    Attributes:
        mean, step: float32 [d]; key = mean + step * (code - 128), about. Where outliers move the
            mean by more than a deviation, `mean` is the median.
        longest, longest_error: over all keys, in steps: Euclidean norm of the code and of its
            rounding error.
        outside: int32; keys too far from the others to have a code. They are always scored.
    """

    mean: np.ndarray
    step: np.ndarray
    longest: float
    longest_error: float
    outside: np.ndarray

    def key_set(
        self,
        keys: Elements,
        codes: np.ndarray,
        *,
        key_guard: PageGuard | None = None,
        code_guard: PageGuard | None = None,
    ) -> Any:
        """What the C++ side takes; guards verify rows of keys and codes at their first touch."""
        return _C.index.KeySet(
            keys.data, DTYPES.index(keys.dtype), codes, self.mean, self.step,
            self.longest, self.longest_error, key_guard, code_guard,
        )  # fmt: skip

    def to_arrays(self) -> tuple[dict[str, float], dict[str, np.ndarray]]:
        settings = {"longest": self.longest, "longest_error": self.longest_error}
        return settings, {"mean": self.mean, "step": self.step, "outside": self.outside}


def row_bytes(head_size: int) -> int:
    """Of one key's code."""
    return -(-head_size // ROW_BYTES_MULTIPLE) * ROW_BYTES_MULTIPLE


def encode(keys: Elements, threads: int) -> tuple[KeyCodes, np.ndarray]:
    """(how, codes uint8 [n, row_bytes]).

    A dimension's range is six deviations of its values, estimated by quantiles so that a few
    outliers do not spoil it, or wider until at most `MAX_OUTSIDE` keys, and an eighth of all, do
    not fit. Raises ValueError: a key is not finite, or so large that differences of keys may
    overflow."""
    n = keys.shape[0]
    mean, low, high = _moments(keys)
    sample = keys.data[np.linspace(0, n - 1, min(n, _SAMPLE_KEYS)).astype(np.int64)]
    # one dimension after the other: numpy takes several times as long for columns
    values = np.ascontiguousarray(Elements(sample, keys.dtype).to_float32().T)
    median = _quantile(values, 0.5)
    distances = np.abs(values - median[:, None])
    half, most = _quantile(distances, 0.5), _quantile(distances, 0.9)
    # the second tells where more than half of all values are the same
    deviation = np.maximum(half / np.float32(0.6745), most / np.float32(3.3))
    centre = np.where(np.abs(mean - median) <= deviation, mean, median)
    largest = np.maximum(high - centre, centre - low)
    deviation = np.where(deviation > 0, deviation, largest / 1000)
    deviations = _DEVIATIONS
    most_outside = min(MAX_OUTSIDE, n // 8)
    while True:
        reach = np.minimum(largest, deviation * np.float32(deviations))
        # never so small that 127 steps round to something shorter
        step = np.where(reach > 0, np.maximum(reach / 127, SMALLEST_STEP), 1).astype(np.float32)
        # 127 steps must reach the farthest value in float32 too
        step *= np.float32(1 + 1e-6)
        codes, outside, (longest, longest_error) = encode_rows(keys, centre, step, threads)
        if outside.sum() <= most_outside or (reach == largest).all():
            break
        deviations *= 2
    ids = np.flatnonzero(outside).astype(np.int32)
    return KeyCodes(centre, step, longest, longest_error, ids), codes


def encode_rows(
    keys: Elements, mean: np.ndarray, step: np.ndarray, threads: int
) -> tuple[np.ndarray, np.ndarray, tuple[float, float]]:
    """Codes uint8 [n, row_bytes], which keys have none, uint8 [n], and (longest, longest_error)."""
    n, d = keys.shape
    codes = aligned_empty((n, row_bytes(d)), np.uint8)
    outside = np.zeros(n, np.uint8)
    norms = _C.index.encode(
        "auto", keys.data, DTYPES.index(keys.dtype), mean, step, 0, n, codes, outside, threads
    )
    return codes, outside, norms


def _quantile(values: np.ndarray, share: float) -> np.ndarray:
    """Of each row, float32; sorts the rows, which is several times as fast as numpy's selection."""
    values.sort(axis=1)
    at = share * (values.shape[1] - 1)
    low, high = values[:, math.floor(at)], values[:, math.ceil(at)]
    return low + np.float32(at - math.floor(at)) * (high - low)


def _moments(keys: Elements) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean, minimum and maximum of each dimension, float32 [d]."""
    n, d = keys.shape
    total = np.zeros(d)
    low, high = np.full(d, np.inf, np.float32), np.full(d, -np.inf, np.float32)
    for begin in range(0, n, 1 << 16):
        chunk = keys.rows(begin, min(n, begin + (1 << 16))).to_float32()
        total += chunk.sum(axis=0, dtype=np.float64)
        np.minimum(low, chunk.min(axis=0), out=low)
        np.maximum(high, chunk.max(axis=0), out=high)
    magnitude = float(np.maximum(high, -low).max())
    if not magnitude <= MAX_MAGNITUDE:  # NaN is not either
        raise ValueError(
            f"keys: magnitudes up to {magnitude:.3g}, expected at most {MAX_MAGNITUDE:g}"
        )
    return (total / n).astype(np.float32), low, high


def lay_out_blocks(codes: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Codes in blocks of sixteen keys for scanning.

    Args:
        order: int32, a multiple of `BLOCK_KEYS` long; which key comes where, -1 for none.

    Returns:
        uint8 [len(order) / 16, 16 * row_bytes].
    """
    blocks = aligned_empty((len(order) // BLOCK_KEYS, BLOCK_KEYS * codes.shape[1]), np.uint8)
    blocks[:] = 128
    _C.index.lay_out(codes, np.ascontiguousarray(order, np.int32), blocks)
    return blocks


class SplitCodes(NamedTuple):
    """Codes in two halves, so that a scan reads the upper ones of all keys and the lower ones of
    few.

    Attributes:
        upper: uint8 [ceil(n / 16), 8 * row_bytes]; blocks of sixteen keys, of each element the
            upper four bits.
        lower: uint8, as `upper`; rows of sixteen keys, of each element the lower four bits.
    """

    upper: np.ndarray
    lower: np.ndarray


def split_codes(codes: np.ndarray) -> SplitCodes:
    """Of all codes [n, row_bytes]."""
    shape = -(-len(codes) // BLOCK_KEYS), BLOCK_KEYS * codes.shape[1] // 2
    halves = SplitCodes(aligned_empty(shape, np.uint8), aligned_empty(shape, np.uint8))
    for half in halves:
        half[-1] = 0  # lanes without a key
    _C.index.split(codes, *halves)
    return halves


def blocks_in_order(codes: np.ndarray) -> np.ndarray:
    """All codes [n, row_bytes] in blocks of sixteen."""
    order = np.full(-(-len(codes) // BLOCK_KEYS) * BLOCK_KEYS, -1, np.int32)
    order[: len(codes)] = np.arange(len(codes))
    return lay_out_blocks(codes, order)


def check_codes(keys: Elements, codes: KeyCodes) -> np.ndarray:
    """The codes uint8 [n, row_bytes] that `keys` have under `codes`. Raises IndexDamagedError: a
    key is not finite, or `codes` is not true of the keys."""
    try:
        check_finite("keys", keys)
    except ValueError as error:
        raise IndexDamagedError(f"index: {error}") from error
    rows, outside, norms = encode_rows(keys, codes.mean, codes.step, 1)
    require(
        np.array_equal(np.flatnonzero(outside), codes.outside)
        and norms[0] <= codes.longest
        and norms[1] <= codes.longest_error,
        "index: what it says of its codes is not true of its keys",
    )
    return rows


def restore_codes(
    settings: dict[str, Any], arrays: dict[str, np.ndarray]
) -> tuple[Elements, KeyCodes]:
    """Keys and their encoding from what an index keeps of them. Raises IndexDamagedError, KeyError,
    TypeError, ValueError, OverflowError: something is missing or does not fit."""
    keys = Elements(arrays["keys"], settings["dtype"])
    mean, step, outside = arrays["mean"], arrays["step"], arrays["outside"]
    longest, longest_error = float(settings["longest"]), float(settings["longest_error"])
    require(
        isinstance(keys.dtype, str)
        and keys.dtype in STORAGE
        and keys.data.dtype == STORAGE[keys.dtype]
        and keys.data.ndim == 2,
        f"index: keys are {keys.data.dtype} {keys.data.shape} for dtype {keys.dtype!r}",
    )
    n, d = keys.shape
    require(n >= 1 and 1 <= d <= MAX_HEAD_SIZE, f"index: keys have shape {[n, d]}")
    require(
        0 <= longest < math.inf and 0 <= longest_error < math.inf,
        f"index: codes of length {longest} with errors of {longest_error}",
    )
    require(
        mean.shape == step.shape == (d,)
        and mean.dtype == step.dtype == np.float32
        and bool(np.isfinite(mean).all() and np.isfinite(step).all() and (step > 0).all()),
        "index: the mean or step of its codes is unusable",
    )
    require(
        outside.ndim == 1
        and outside.dtype == np.int32
        and (not outside.size or (outside[0] >= 0 and outside[-1] < n))
        and bool((outside[1:] > outside[:-1]).all()),
        "index: the keys without codes are none of its keys, or not in their order",
    )
    return keys, KeyCodes(mean, step, longest, longest_error, outside)

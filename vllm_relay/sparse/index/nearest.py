# SPDX-License-Identifier: Apache-2.0
"""The nearest keys of many queries, on the CPU or a GPU: the first half of building a graph."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from vllm_relay import _C
from vllm_relay.sparse.index.elements import Elements
from vllm_relay.sparse.index.key_codes import KeyCodes

_PRODUCTS_AT_ONCE = 1 << 28
_FEWEST_ROWS = 32
_MULTIPLE = 8  # of the sizes that integer products on a GPU want


def nearest_keys(
    keys: Elements,
    codes: KeyCodes,
    rows: np.ndarray,
    queries: np.ndarray,
    k: int,
    *,
    threads: int,
    device: str | None = None,
) -> np.ndarray:
    """int32 [m, k]: the keys with the largest inner products, best first, -1 past their number.

    Candidates are chosen by products of codes, which are whole numbers, and compared exactly
    afterwards: the result is the same on every device.

    Args:
        rows: uint8 [n, row_bytes]; the codes of the keys.
        queries: float32 [m, d].
        device: None: the GPU that torch knows of, if torch is loaded and does, else the CPU;
            "cpu", or the name of a torch device.
    """
    key_set = codes.key_set(keys, rows)
    queries = np.ascontiguousarray(queries)
    ids = np.empty((len(queries), k), np.int32)
    if device is None:
        torch = sys.modules.get("torch")
        device = "cuda" if torch is not None and torch.cuda.is_available() else "cpu"
    if device == "cpu":
        _C.index.nearest("auto", key_set, queries, codes.outside, ids, threads)
    elif len(queries):
        candidates = candidates_by_torch(key_set, rows, queries, k, device)
        _C.index.refine("auto", key_set, queries, candidates, codes.outside, ids, threads)
    return ids


def candidates_by_torch(
    key_set: Any, rows: np.ndarray, queries: np.ndarray, k: int, device: str
) -> np.ndarray:
    """int32 [m, candidates]: the keys with the largest products of codes, as the C++ side picks
    them: of equal ones those that come first in its order."""
    import torch

    n, row_bytes = rows.shape
    keep = min(n, _C.index.num_rescored(k))
    order = _C.index.spread_order(n)
    padded = -(-n // _MULTIPLE) * _MULTIPLE
    signed = np.zeros((padded, row_bytes), np.int8)
    signed[:n] = (rows[order].astype(np.int16) - 128).astype(np.int8)
    keys = torch.from_numpy(signed).to(device).T
    query_codes = np.empty((len(queries), row_bytes), np.int8)
    _C.index.encode_queries("auto", key_set, queries, query_codes)
    positions = torch.arange(n, device=device)
    at_once = max(_FEWEST_ROWS, _PRODUCTS_AT_ONCE // padded // _FEWEST_ROWS * _FEWEST_ROWS)
    candidates = np.empty((len(queries), keep), np.int32)
    for begin in range(0, len(queries), at_once):
        part = query_codes[begin : begin + at_once]
        block = np.zeros((max(_FEWEST_ROWS, len(part)), row_bytes), np.int8)
        block[: len(part)] = part
        products = torch._int_mm(torch.from_numpy(block).to(device), keys)[: len(part), :n]
        # one number to sort by: larger products first, then earlier positions
        ranks = products.long() * (1 << 32) - positions
        best = ranks.topk(keep, dim=1).indices
        candidates[begin : begin + len(part)] = order[best.cpu().numpy()]
    return candidates

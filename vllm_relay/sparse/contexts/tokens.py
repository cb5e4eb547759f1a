# SPDX-License-Identifier: Apache-2.0
"""Token ids as users hand them in, and what two sequences have in common."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, TypeVar

import numpy as np

TOKEN_DTYPE = np.int64
_WANTED = (
    "expected the token ids of one sequence: list[int], or a tensor of [tokens] or [1, tokens]"
)


class HasTokens(Protocol):
    """A context: its token ids."""

    @property
    def tokens(self) -> np.ndarray: ...


Context = TypeVar("Context", bound=HasTokens)


def as_tokens(name: str, tokens: Any) -> np.ndarray:
    """Token ids as int64 [tokens].

    Args:
        tokens: a list of ints, an array or tensor [tokens], or a batch of one of these.

    Raises:
        ValueError: no token ids, none at all, one below 0 or from 2^31 on, or several sequences.
    """
    if isinstance(tokens, str):
        raise ValueError(f"{name}: given text, {_WANTED}; call the tokenizer first")
    if hasattr(tokens, "detach"):  # of torch, perhaps on another device
        tokens = tokens.detach().cpu().numpy()
    try:
        array = np.asarray(tokens)
    except ValueError:  # sequences of different lengths
        raise ValueError(_several(name, len(tokens))) from None
    if array.ndim == 2 and array.shape[0] > 1:
        raise ValueError(_several(name, array.shape[0]))
    if array.ndim == 2 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise ValueError(f"{name}: given {array.dtype} of shape {list(array.shape)}, {_WANTED}")
    if array.size == 0:
        raise ValueError(f"{name}: given no tokens, {_WANTED}")
    if array.min() < 0:
        raise ValueError(f"{name}: holds the negative token id {array.min()}, {_WANTED}")
    if array.max() >= 2**31:
        raise ValueError(f"{name}: holds the token id {array.max()}, expected less than {2**31}")
    return array.astype(TOKEN_DTYPE)


def drop_first(tokens: Any, count: int) -> Any:
    """`tokens` without its first `count` ids, in the form it has: a list, a tensor, a batch."""
    if hasattr(tokens, "shape"):
        return tokens[..., count:]
    if isinstance(tokens[0], (list, tuple)):
        return [list(tokens[0][count:])]
    return list(tokens[count:])


def common_prefix_len(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens two sequences begin with in common; looks little further than that."""
    length = min(len(a), len(b))
    begin, size = 0, 64
    while begin < length:
        end = min(begin + size, length)
        differs = a[begin:end] != b[begin:end]
        if differs.any():
            return begin + int(differs.argmax())
        begin, size = end, size * 2
    return length


def longest_prefix(contexts: Iterable[Context], tokens: np.ndarray) -> tuple[Context | None, int]:
    """The context that shares most first tokens with `tokens`, and how many; of several the
    shortest, whose index holds least besides. None and 0 if none shares any."""
    best: Context | None = None
    best_len = 0
    for context in contexts:
        length = common_prefix_len(context.tokens, tokens)
        if length == 0 or length < best_len:
            continue
        if best is None or length > best_len or len(context.tokens) < len(best.tokens):
            best, best_len = context, length
    return best, best_len


def _several(name: str, count: int) -> str:
    return (
        f"{name}: given {count} sequences, expected one: a session holds one sequence; "
        "create a session for each"
    )

# SPDX-License-Identifier: Apache-2.0
"""Keys and values of a session: a buffer that grows, and what `Session.update` returns, which is
put together when somebody reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

_MIN_CAPACITY_TOKENS = 64


class SessionStates(torch.Tensor):
    """The keys or values of all tokens of a session's layer, [1, kv_heads, tokens, head_size].

    The attention function `relay_sparse` takes the layer from it and never builds the tensor. To
    any other function it is the whole tensor, copied together from the reused context and the
    session's own tokens at every call: right with any attention, and slow.
    """

    layer: Any
    """Its `SessionLayer`, which makes these."""
    part: str
    """Either "keys" or "values"."""

    @staticmethod
    def __new__(
        cls,
        layer: Any,
        part: str,
        shape: tuple[int, ...],
        like: torch.Tensor,
    ) -> SessionStates:
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        self.layer = layer
        self.part = part
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return func(*tree_map(_whole, args), **tree_map(_whole, kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"SessionStates({self.part}, shape={list(self.shape)}, dtype={self.dtype})"

    def whole(self) -> torch.Tensor:
        """Raises RuntimeError: the session is closed or was cropped in between."""
        num_tokens = self.shape[2]
        if self.layer.get_seq_length() < num_tokens:
            raise RuntimeError(
                f"these {self.part} are of {num_tokens} tokens, their session holds "
                f"{self.layer.get_seq_length()} by now: read them before it is cropped or closed"
            )
        return getattr(self.layer, self.part)[:, :, :num_tokens]


def _whole(item: Any) -> Any:
    return item.whole() if isinstance(item, SessionStates) else item


class StateBuffer:
    """Keys and values of one layer, [kv_heads, tokens, size]; appending is amortised O(tokens)."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Takes the tensors over; room for more tokens is made at the first `append`."""
        self._keys, self._values = keys, values
        self.num_tokens = keys.shape[1]

    @property
    def keys(self) -> torch.Tensor:
        return self._keys[:, : self.num_tokens]

    @property
    def values(self) -> torch.Tensor:
        return self._values[:, : self.num_tokens]

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        end = self.num_tokens + keys.shape[1]
        if end > self._keys.shape[1]:
            capacity = max(_MIN_CAPACITY_TOKENS, end + end // 4)
            self._keys = _grown(self.keys, capacity)
            self._values = _grown(self.values, capacity)
        self._keys[:, self.num_tokens : end] = keys
        self._values[:, self.num_tokens : end] = values
        self.num_tokens = end

    def crop(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def copy(self) -> StateBuffer:
        return StateBuffer(self.keys.clone(), self.values.clone())


def _grown(states: torch.Tensor, capacity_tokens: int) -> torch.Tensor:
    num_heads, num_tokens, size = states.shape
    grown = states.new_empty(num_heads, capacity_tokens, size)
    grown[:, :num_tokens] = states
    return grown

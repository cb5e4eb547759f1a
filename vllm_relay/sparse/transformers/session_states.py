# SPDX-License-Identifier: Apache-2.0
"""What `Session.update` returns: keys and values that are put together when somebody reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_map


class SessionStates(torch.Tensor):
    """The keys or values of all tokens of a session's layer, [1, kv_heads, tokens, head_size].

    The attention function `relay_sparse` takes the layer from it and never builds the tensor. To
    any other function it is the whole tensor, copied together from the reused context and the
    session's own tokens at every call: right with any attention, and slow.
    """

    layer: Any
    """Its `SessionLayer`, which makes these."""
    part: Literal["keys", "values"]

    @staticmethod
    def __new__(
        cls,
        layer: Any,
        part: Literal["keys", "values"],
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

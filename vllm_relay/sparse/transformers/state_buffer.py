# SPDX-License-Identifier: Apache-2.0
"""Keys and values that grow token by token."""

from __future__ import annotations

import torch

_MIN_CAPACITY_TOKENS = 64


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

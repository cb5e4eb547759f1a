# SPDX-License-Identifier: Apache-2.0
"""A running sequence: a reused context and what was computed after it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache

from vllm_relay.sparse.contexts.context_store import StoredContext
from vllm_relay.sparse.contexts.model_fingerprint import ModelBinding
from vllm_relay.sparse.contexts.retrieval import SessionStats
from vllm_relay.sparse.contexts.tokens import as_tokens
from vllm_relay.sparse.plan.options import DBOptions
from vllm_relay.sparse.transformers import hf
from vllm_relay.sparse.transformers.session_layer import SessionLayer

hf.register()

_WHOLE_PROMPT = (
    "pass generate() the whole prompt, or the rest of it as generate(**session.inputs(remaining))"
)


class Session(Cache):
    """The cache of one sequence, for `past_key_values` of a transformers model.

    With `attn_implementation="relay_sparse"` the tokens being decoded read a window of the reused
    context and what its indexes find. With any other attention a session is an exact, slow
    `DynamicCache`. Made by `DB.create_session`; one thread at a time may use a session, and any
    number of sessions may read one context.

    Attributes:
        tokens: int64 [prompt tokens]; the prompt that the session was created for, as far as it
            was not cropped.
        prefix_len: how many of them are reused.
        stats: what decode steps have read so far.
        model: the binding of the database that made the session.

    Source: AlayaDB (2504.10326), section 5, table 2.
    """

    layers: list[SessionLayer]  # type: ignore[assignment]

    def __init__(
        self,
        tokens: np.ndarray,
        context: StoredContext | None,
        prefix_len: int,
        options: DBOptions,
        model: ModelBinding,
    ) -> None:
        self.tokens = tokens
        self.prefix_len = prefix_len
        self.options = options
        self.stats = SessionStats()
        self._context = context
        self.model = model
        self._is_closed = False
        self._has_prefilled = False
        num_layers = context.shape.num_layers if context is not None else 0
        # plain layers, and none that Cache adds by itself: they need their context
        super().__init__(layers=[self._new_layer(i) for i in range(num_layers)])

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds the keys and values of new tokens to a layer, as `DynamicCache.update`.

        Args:
            key_states, value_states: [1, kv_heads, new tokens, head_size].

        Returns:
            keys and values of all tokens, the reused ones included: [1, kv_heads, tokens,
            head_size], put together when they are read.

        Raises:
            ValueError: a batch, gradients, another model's states, or a prompt of which only a
                part has been computed.
            RuntimeError: the session is closed, or a forward pass over it has failed.
        """
        self._check_open()
        if layer_idx >= len(self.layers):
            self._add_layers(layer_idx)
        layer = self.layers[layer_idx]
        if layer_idx == 0:
            self._check_whole()
            self._check_prefill(key_states.shape[-2], layer.get_seq_length())
        return layer.update(key_states, value_states)

    def attention(
        self,
        query: torch.Tensor,
        layer_idx: int,
        *,
        scale: float | None = None,
        sliding_window: int | None = None,
    ) -> torch.Tensor:
        """Causal attention of the newest tokens over all tokens of a layer.

        One query token over a reused context of at least `min_context_tokens` tokens retrieves;
        several, e.g. the rest of a prompt, are exact.

        Args:
            query: [1, heads, new tokens, head_size]; of the tokens that were added last.
            scale: factor of the scores; 1 / sqrt(head_size) if None.
            sliding_window: a query sees this many tokens, itself included; computed exactly.

        Returns:
            [1, heads, new tokens, value_size], the dtype of `query`.

        Raises:
            ValueError: the query does not fit the keys, or the layer does not exist.
            RuntimeError: the session is closed.
        """
        self._check_open()
        if not 0 <= layer_idx < len(self.layers):
            raise ValueError(f"layer {layer_idx} of {len(self.layers)}: call update() first")
        return self.layers[layer_idx].attention(query, scale=scale, sliding_window=sliding_window)

    def inputs(self, remaining: Any) -> dict[str, Any]:
        """What `generate` needs to go on with the rest of the prompt only:
        `model.generate(**session.inputs(remaining))`.

        Args:
            remaining: token ids that follow those the session holds: as `create_session` gives
                them, or a whole next turn.
        """
        input_ids = torch.from_numpy(as_tokens("remaining", remaining))[None]
        if isinstance(remaining, torch.Tensor):
            input_ids = input_ids.to(remaining.device)
        num_tokens = self.get_seq_length() + input_ids.shape[1]
        return {
            "input_ids": input_ids,
            "attention_mask": input_ids.new_ones(1, num_tokens),
            "past_key_values": self,
        }

    def get_seq_length(self, layer_idx: int = 0) -> int:
        self._check_open()
        return super().get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        self._check_open()
        if query_length == 0:
            raise ValueError(f"the model was given no tokens: {_WHOLE_PROMPT}")
        num_tokens, offset = super().get_mask_sizes(query_length, layer_idx)
        return hf.SessionLength(num_tokens), offset

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """As `DynamicCache.crop`; tokens that were reused can be removed too."""
        self._check_open()
        super().crop(tokens_to_remove)
        self._forget_from(self.get_seq_length())

    def reset(self) -> None:
        """Removes all tokens, also those that were reused."""
        self._check_open()
        super().reset()
        self._forget_from(0)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._check_single("reorder_cache", beam_idx.tolist() == [0])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._check_single("batch_repeat_interleave", repeats == 1)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._check_single("batch_select_indices", indices.tolist() in ([0], [True]))

    @property
    def context_id(self) -> str | None:
        """Of the context whose tokens are reused."""
        return None if self._context is None else self._context.id

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        """Frees the session's tokens and lets go of its context; may be called again."""
        self._is_closed = True
        for layer in self.layers:
            layer.close()
        self.layers = []
        self._context = None

    def __enter__(self) -> Session:
        self._check_open()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __deepcopy__(self, memo: dict) -> Session:
        """A session that goes on by itself; both read the same context."""
        self._check_open()
        twin = Session(self.tokens, self._context, self.prefix_len, self.options, self.model)
        twin._has_prefilled = self._has_prefilled
        twin.layers = [layer.copy(twin.stats) for layer in self.layers]
        return twin

    def __repr__(self) -> str:
        if self._is_closed:
            return "Session(closed)"
        return f"Session(tokens={self.get_seq_length()}, reused={self.prefix_len})"

    def _new_layer(self, layer_idx: int) -> SessionLayer:
        return SessionLayer(
            layer_idx, self._context, self.prefix_len, self.options, self.stats, self.model
        )

    def _add_layers(self, layer_idx: int) -> None:
        if self._context is not None:
            raise ValueError(
                f"layer {layer_idx}: the reused context has {len(self.layers)} layers: is this the "
                "model that the session was created for?"
            )
        while len(self.layers) <= layer_idx:
            self.layers.append(self._new_layer(len(self.layers)))

    def _forget_from(self, num_tokens: int) -> None:
        self.tokens = self.tokens[:num_tokens]
        self.prefix_len = min(self.prefix_len, num_tokens)

    def _check_whole(self) -> None:
        lengths = [layer.get_seq_length() for layer in self.layers]
        if lengths.count(lengths[0]) != len(lengths):
            raise RuntimeError(
                f"the session's layers hold {min(lengths)} to {max(lengths)} tokens: a "
                "forward pass over it has failed; make a new one with DB.create_session()"
            )

    def _check_prefill(self, num_new: int, num_tokens: int) -> None:
        """`generate` drops the first tokens of what it takes for the whole sequence: given only
        the rest of a prompt without an attention mask, it would leave tokens out in silence."""
        num_prompt = len(self.tokens)
        missing = num_prompt - num_tokens - num_new
        num_remaining = num_prompt - self.prefix_len
        is_first = num_tokens == self.prefix_len
        left_out = is_first and num_new > 1 and num_new == num_remaining - self.prefix_len
        if missing > 0 and ((self._has_prefilled and num_new == 1) or left_out):
            raise ValueError(
                f"{num_tokens + num_new} of the prompt's {num_prompt} tokens were given to the "
                f"model: {_WHOLE_PROMPT}"
            )
        self._has_prefilled = self._has_prefilled or num_new > 1

    def _check_single(self, method: str, is_identity: bool) -> None:
        self._check_open()
        if not is_identity:
            raise ValueError(
                f"{method}: a session holds one sequence: generate without beam search and "
                "num_return_sequences, or copy.deepcopy() the session for each"
            )

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("the session is closed: make a new one with DB.create_session()")

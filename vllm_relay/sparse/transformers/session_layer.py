# SPDX-License-Identifier: Apache-2.0
"""One layer of a session: its keys and values, and attention over them."""

from __future__ import annotations

import functools
import math

import torch
from transformers.cache_utils import CacheLayerMixin

from vllm_relay.attention_backends.ops import merge_states
from vllm_relay.sparse.contexts.context_store import StoredContext
from vllm_relay.sparse.contexts.model_fingerprint import ModelBinding
from vllm_relay.sparse.contexts.partial_attention import attention_state, window_state
from vllm_relay.sparse.contexts.retrieval import SessionStats, parts_of, retrieve
from vllm_relay.sparse.contexts.train_queries import TrainQueries
from vllm_relay.sparse.index.elements import Elements, copied_elements, to_tensor
from vllm_relay.sparse.plan.options import DBOptions
from vllm_relay.sparse.transformers.session_states import SessionStates, StateBuffer


class SessionLayer(CacheLayerMixin):
    """The first `prefix_len` tokens of a stored context, and the tokens computed since.

    A window of the context (its first and last tokens) and the new tokens lie in one buffer on the
    model's device; a context that is too short to be searched lies there as a whole.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(
        self,
        layer_idx: int,
        context: StoredContext | None,
        prefix_len: int,
        options: DBOptions,
        stats: SessionStats,
        model: ModelBinding,
    ) -> None:
        # not CacheLayerMixin's: it assigns keys and values, which are properties here
        self.layer_idx = layer_idx
        self.prefix_len = prefix_len
        self.is_initialized = False
        self._context = context
        self._options = options
        self._stats = stats
        self.model = model
        self._local: StateBuffer | None = None
        self._train_queries = TrainQueries(options.train_queries_per_key)

    @property
    def retrieves(self) -> bool:
        """Whether the context is long enough to be searched."""
        window = self._options.sink_tokens + self._options.recent_tokens
        return self.prefix_len >= max(self._options.min_context_tokens, window + 1)

    @property
    def keys(self) -> torch.Tensor:  # type: ignore[override]
        """[1, kv_heads, tokens, head_size], the reused context included: a copy if it is long."""
        return self.states()[0][None]

    @property
    def values(self) -> torch.Tensor:  # type: ignore[override]
        """[1, kv_heads, tokens, value_size]; as `keys`."""
        return self.states()[1][None]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        window = [
            self._context_states(begin, end, key_states.device) for begin, end in self._window()
        ]
        if window:
            keys, values = (torch.cat(parts, 1) for parts in zip(*window, strict=True))
        else:
            keys, values = key_states[0, :, :0], value_states[0, :, :0]
        self._local = StateBuffer(keys, values)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends the states of new tokens, [1, kv_heads, new tokens, size]. Raises ValueError: a
        batch, gradients, or states that do not fit those before."""
        self._check(key_states, value_states)
        if self._local is None:
            self.lazy_initialization(key_states, value_states)
        assert self._local is not None
        self._local.append(key_states[0], value_states[0])
        num_tokens = self.get_seq_length()
        keys, values = (
            SessionStates(self, part, (1, states.shape[1], num_tokens, states.shape[3]), states)
            for part, states in (("keys", key_states), ("values", value_states))
        )
        return keys, values

    def attention(
        self,
        query: torch.Tensor,
        *,
        scale: float | None = None,
        sliding_window: int | None = None,
    ) -> torch.Tensor:
        """As `Session.attention`."""
        local = self._local
        if local is None or query.dim() != 4 or query.shape[2] > self._num_new():
            raise ValueError(
                f"query: shape {list(query.shape)} in a layer with "
                f"{0 if local is None else self._num_new()} new tokens, expected "
                "[1, heads, new tokens, head_size]; call update() before attention()"
            )
        num_kv_heads, _, head_size = local.keys.shape
        if query.shape[0] != 1 or query.shape[1] % num_kv_heads or query.shape[3] != head_size:
            raise ValueError(
                f"query: shape {list(query.shape)}, expected [1, heads, new tokens, {head_size}] "
                f"with a multiple of {num_kv_heads} heads"
            )
        scale = 1 / math.sqrt(head_size) if scale is None else scale
        num_tokens, num_queries = self.get_seq_length(), query.shape[2]
        grouped = query[0].unflatten(0, (num_kv_heads, -1))  # [kv_heads, group, queries, size]
        self._train_queries.add(grouped, first_position=num_tokens - num_queries)
        if sliding_window is not None and num_tokens > sliding_window:
            output = self._sliding(grouped, scale, sliding_window)
        elif num_queries == 1 and self.retrieves:
            output = self._retrieved(grouped[:, :, 0], scale)[:, :, None]
        else:
            output = self._dense(grouped, scale)
        return output.flatten(0, 1)[None].to(query.dtype)

    def states(
        self, begin: int = 0, device: torch.device | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the tokens from `begin` on, [kv_heads, tokens, size].

        Args:
            device: None: that of the tokens computed since, if there are any.
        """
        local = self._local
        if local is None:
            device = device or torch.device("cpu")
            return self._context_states(min(begin, self.prefix_len), self.prefix_len, device)
        device = device or local.keys.device
        new_begin = begin
        if self.retrieves:
            new_begin = local.num_tokens - self._num_new() + max(begin - self.prefix_len, 0)
        new = [part[:, new_begin:].to(device) for part in (local.keys, local.values)]
        if not self.retrieves or begin >= self.prefix_len:
            return new[0], new[1]
        old = self._context_states(begin, self.prefix_len, device)
        return torch.cat([old[0], new[0]], 1), torch.cat([old[1], new[1]], 1)

    def elements(self) -> list[tuple[Elements, Elements]]:
        """Copies of the keys and values of all tokens, for each kv head [tokens, size]. Raises
        ValueError: of a dtype that contexts are not kept in."""
        name = f"layer {self.layer_idx}"
        return [
            (copied_elements(f"{name}: keys", keys), copied_elements(f"{name}: values", values))
            for keys, values in zip(*self.states(device=torch.device("cpu")), strict=True)
        ]

    def train_queries(self) -> list[Elements | None]:
        """For each kv head [m, head_size]: a sample of the queries that its keys have met, those
        stored with the reused context and those of the new tokens, in token order and in the dtype
        of the keys."""
        new, expected = self._train_queries.sample(), self._expected()
        assert expected is not None
        num_kv_heads, _, _, dtype = expected
        samples: list[Elements | None] = []
        for head in range(num_kv_heads):
            parts = [] if new is None else [new[head]]
            if self._context is not None:
                stored = self._context.queries(self.layer_idx, head, 0, self.prefix_len)
                parts = parts if stored is None else [to_tensor(stored), *parts]
            name, dtype_name = f"layer {self.layer_idx}: queries", str(dtype).removeprefix("torch.")
            samples.append(copied_elements(name, torch.cat(parts), dtype_name) if parts else None)
        return samples

    @property
    def group_size(self) -> int:
        """Query heads that share a kv head; 1 if neither a query nor the model says."""
        return max(self._train_queries.group, self.model.group_size)

    def get_seq_length(self) -> int:
        return self.prefix_len + self._num_new()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """As `DynamicLayer.crop`: a negative number of tokens to remove, or a length to keep."""
        length = self.get_seq_length()
        kept = length + tokens_to_remove if tokens_to_remove <= 0 else tokens_to_remove
        if kept >= length:
            return
        kept = max(kept, 0)
        self._train_queries.crop(kept)
        if kept >= self.prefix_len and self._local is not None:
            self._local.crop(self._local.num_tokens - (length - kept))
            return
        self.prefix_len = kept
        self._local = None
        self.is_initialized = False
        if kept == 0:
            self._context = None

    def reset(self) -> None:
        self.crop(-self.get_seq_length())

    def close(self) -> None:
        self._context = None
        self._local = None
        self.prefix_len = 0
        self._train_queries.crop(0)

    def copy(self, stats: SessionStats) -> SessionLayer:
        """A layer that goes on by itself and shares the context."""
        twin = SessionLayer(
            self.layer_idx, self._context, self.prefix_len, self._options, stats, self.model
        )
        twin._local = None if self._local is None else self._local.copy()
        twin.is_initialized = self.is_initialized
        twin._train_queries = self._train_queries.copy()
        return twin

    def _window(self) -> list[tuple[int, int]]:
        """The parts of the context that lie in the buffer."""
        if self._context is None:
            return []
        if not self.retrieves:
            return [(0, self.prefix_len)]
        recent = self.prefix_len - self._options.recent_tokens
        return [(0, self._options.sink_tokens), (recent, self.prefix_len)]

    def _num_new(self) -> int:
        if self._local is None:
            return 0
        return self._local.num_tokens - sum(end - begin for begin, end in self._window())

    def _context_states(
        self, begin: int, end: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._context is None:
            raise ValueError(f"layer {self.layer_idx} holds no tokens yet")
        rows = [
            self._context.rows(self.layer_idx, head, begin, end)
            for head in range(self._context.shape.num_kv_heads)
        ]
        keys, values = (
            torch.stack([to_tensor(part) for part in parts]) for parts in zip(*rows, strict=True)
        )
        return keys.to(device), values.to(device)

    def _retrieved(self, query: torch.Tensor, scale: float) -> torch.Tensor:
        """[kv_heads, group, head_size] -> float32 [kv_heads, group, value_size]."""
        assert self._local is not None and self._context is not None
        (_, begin), (end, _) = self._window()
        parts = parts_of(self._context, self.layer_idx, begin, end)
        output, lse, window_max = window_state(query, self._local.keys, self._local.values, scale)
        found = retrieve(
            parts, query, window_max, scale=scale, options=self._options, stats=self._stats
        )
        return merge_states(output, lse, *found)[0]

    def _dense(self, query: torch.Tensor, scale: float) -> torch.Tensor:
        """[kv_heads, group, queries, head_size] -> float32 [kv_heads, group, queries, ...]."""
        assert self._local is not None
        num_kv_heads, group, num_queries, _ = query.shape
        rows = query.flatten(1, 2)
        begin, end = 0, self._local.num_tokens - num_queries
        states: list[tuple[torch.Tensor, ...]] = []
        if self.retrieves:
            parts = [self._context_state(head, rows[head], scale) for head in range(num_kv_heads)]
            states.append(tuple(torch.stack(each) for each in zip(*parts, strict=True)))
            begin = self._local.num_tokens - self._num_new()
        keys, values = self._local.keys, self._local.values
        states.append(attention_state(rows, keys[:, begin:end], values[:, begin:end], scale))
        new_keys, new_values = (
            part[:, None, end:].expand(-1, group, -1, -1).flatten(0, 1) for part in (keys, values)
        )
        new = attention_state(query.flatten(0, 1), new_keys, new_values, scale, causal=True)
        states.append(tuple(x.unflatten(0, (num_kv_heads, group)).flatten(1, 2) for x in new))
        output, _ = functools.reduce(lambda one, other: merge_states(*one, *other), states)
        return output.unflatten(1, (group, num_queries))

    def _context_state(
        self, head: int, rows: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of queries that come after the reused context, over all of it."""
        assert self._context is not None
        keys, values = (
            to_tensor(part).to(rows.device)
            for part in self._context.rows(self.layer_idx, head, 0, self.prefix_len)
        )
        output, lse = attention_state(rows[None], keys[None], values[None], scale)
        return output[0], lse[0]

    def _sliding(self, query: torch.Tensor, scale: float, sliding_window: int) -> torch.Tensor:
        num_kv_heads, group, num_queries, _ = query.shape
        num_tokens = self.get_seq_length()
        begin = max(num_tokens - num_queries - sliding_window + 1, 0)
        keys, values = self.states(begin)
        own = torch.arange(num_tokens - num_queries, num_tokens, device=query.device)[:, None]
        position = torch.arange(begin, num_tokens, device=query.device)
        mask = (position <= own) & (position > own - sliding_window)
        output = torch.nn.functional.scaled_dot_product_attention(
            query.flatten(0, 1)[None],
            keys.repeat_interleave(group, 0)[None],
            values.repeat_interleave(group, 0)[None],
            attn_mask=mask,
            scale=scale,
        )
        return output[0].unflatten(0, (num_kv_heads, group))

    def _check(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        for name, states in (("key_states", key_states), ("value_states", value_states)):
            if states.dim() != 4:
                raise ValueError(
                    f"{name}: shape {list(states.shape)}, expected [1, kv_heads, tokens, size]"
                )
            if states.shape[0] != 1:
                raise ValueError(
                    f"{name}: a batch of {states.shape[0]}; a session holds one sequence: use one "
                    "session per sequence, without beam search and num_return_sequences"
                )
            if states.requires_grad:
                raise ValueError(
                    f"{name}: requires gradients; a session serves inference: run the model under "
                    "torch.no_grad() or torch.inference_mode()"
                )
        expected = self._expected()
        given = (key_states.shape[1], key_states.shape[3], value_states.shape[3], key_states.dtype)
        if value_states.shape[:3] != key_states.shape[:3] or (expected and given != expected):
            want = expected or given
            raise ValueError(
                f"layer {self.layer_idx}: keys of shape {list(key_states.shape)} and values of "
                f"shape {list(value_states.shape)} in {key_states.dtype}, expected {want[0]} kv "
                f"heads, head size {want[1]}, value size {want[2]} and {want[3]} as before: is "
                "this the model that the session was created for?"
            )

    def _expected(self) -> tuple[int, int, int, torch.dtype] | None:
        if self._local is not None:
            keys, values = self._local.keys, self._local.values
            return keys.shape[0], keys.shape[2], values.shape[2], keys.dtype
        if self._context is not None:
            shape = self._context.shape
            dtype = getattr(torch, shape.dtype)
            return shape.num_kv_heads, shape.head_size, shape.value_size, dtype
        return None

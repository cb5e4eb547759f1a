# SPDX-License-Identifier: Apache-2.0
"""A database of contexts: sequences whose keys and values are kept, indexed and reused."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vllm_relay.sparse.contexts.context_store import (
    ContextStore,
    HeadStates,
    MemoryContextStore,
    StoredContext,
    context_id_of,
    num_bytes_of,
)
from vllm_relay.sparse.contexts.disk.disk_context_store import DiskContextStore
from vllm_relay.sparse.contexts.model_fingerprint import ModelBinding, context_fingerprint
from vllm_relay.sparse.contexts.tokens import (
    as_tokens,
    common_prefix_len,
    drop_first,
    longest_prefix,
)
from vllm_relay.sparse.index.elements import Elements
from vllm_relay.sparse.plan.index_choice import build_index
from vllm_relay.sparse.plan.options import DBOptions
from vllm_relay.sparse.plan.search_cost import load_costs
from vllm_relay.sparse.transformers.kv_cache import (
    LayerElements,
    check_layer,
    read_kv_cache,
    read_queries,
)
from vllm_relay.sparse.transformers.session import Session


class DatabaseFullError(ValueError):
    """Storing a context would take more memory than `memory_limit_bytes`."""


@dataclass(frozen=True)
class ContextInfo:
    """A stored context; `num_bytes` are keys, values and indexes."""

    id: str
    num_tokens: int
    num_bytes: int


class DB:
    """Contexts of one model, and sessions that reuse them.

    Any number of threads may call it at once.

    Args:
        path: folder of the contexts, for which `model` is needed; None keeps them in memory.
        options: `DBOptions`, or a dict of them.
        model: the transformers model whose contexts these are, or its configuration. None: the
            first model that computes in a session. Models of another configuration are refused;
            other weights of the same one are not told in a session.

    Raises:
        ValueError: an option, the path, the model, or the file of search costs that plans go by, is
            unusable.

    Source: AlayaDB (2504.10326), section 5, table 2; late materialisation and reuse of a part:
        sections 7.1 and 7.2.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        options: DBOptions | dict[str, Any] | None = None,
        *,
        model: Any = None,
    ) -> None:
        self.options = DBOptions.model_validate({} if options is None else options)
        self._costs = load_costs() if self.options.index == "auto" else None
        self._model = ModelBinding(model)
        self._is_on_disk = path is not None
        self._store = _open_store(path, model, self.options)
        self._lock = threading.Lock()
        self._adding = threading.Lock()
        self._live: weakref.WeakSet[StoredContext] = weakref.WeakSet()
        self._is_closed = False

    def create_session(self, prompts: Any) -> tuple[Session, Any]:
        """A session that reuses the longest prefix the prompt shares with a stored context.

        The last token of the prompt is always left to the model, which has to compute its logits.

        Args:
            prompts: token ids of one sequence: list[int], a tensor [tokens], or a batch of one.

        Returns:
            the session, and the token ids the model still has to compute, in the form of
            `prompts`.

        Raises:
            ValueError: no token ids, or several sequences.
            RuntimeError: the database is closed.
        """
        tokens = as_tokens("prompts", prompts)
        self._check_open()
        context, prefix_len = longest_prefix(self._store.contexts(), tokens[:-1])
        session = Session(tokens, context, prefix_len, self.options, self._model)
        return session, drop_first(prompts, prefix_len)

    def import_(self, prompts: Any, kv_cache: Any, *, queries: Sequence[Any] | None = None) -> str:
        """Stores a context that was computed elsewhere, and indexes it.

        Args:
            prompts: its token ids, as for `create_session`.
            kv_cache: a transformers `DynamicCache`, or for each layer (keys, values), tensors
                [1, kv_heads, tokens, size] in float32, float16 or bfloat16. Copied.
            queries: for each layer [heads, tokens, head_size]: queries for the indexes to learn
                from, as the attention of the model has them (rotated).

        Returns:
            the id of the context; of the one that is there, if the same tokens were stored before.

        Raises:
            ValueError: the arguments are unusable or do not fit together.
            DatabaseFullError: there is no room for it.
            RuntimeError: the database is closed.
        """
        tokens = as_tokens("prompts", prompts)
        known = self._stored(tokens)
        if known is not None:
            return known.id
        layers = read_kv_cache(kv_cache, len(tokens))
        limit = int(len(tokens) * self.options.train_queries_per_key)
        train_queries = read_queries(queries, layers, limit)
        group = 1 if queries is None else queries[0].shape[0] // len(layers[0])
        return self._add(tokens, layers, train_queries, group)

    def store(self, session: Session, tokens: Any = None) -> str:
        """Makes the tokens of a session a context of its own, reused ones and new ones.

        This is when new tokens are indexed; until then a session reads them one by one. The
        session goes on as it is. One that has computed nothing yet is the prefix that it reuses.

        Args:
            tokens: token ids of the sequence so far, e.g. the output of `generate`; may be longer
                than what the session has computed. None: the prompt, if nothing follows it.

        Returns:
            as `import_`.

        Raises:
            ValueError: the session belongs to another database, holds no tokens, or `tokens` does
                not continue its prompt or lacks some of the tokens.
            DatabaseFullError: there is no room for it.
            RuntimeError: the session or the database is closed.
        """
        if session.model is not self._model:
            raise ValueError("session: made by another database; store it there")
        num_tokens = session.get_seq_length()
        all_tokens = self._tokens_of(session, tokens, num_tokens)
        known = self._stored(all_tokens)
        if known is not None:
            return known.id
        layers: LayerElements = []
        queries: list[list[Elements | None]] = []
        for i, layer in enumerate(session.layers):
            if layer.get_seq_length() != num_tokens:
                raise ValueError(
                    f"session: layer {i} holds {layer.get_seq_length()} tokens, layer 0 "
                    f"{num_tokens}; store it between forward passes"
                )
            layers.append(layer.elements())
            queries.append(layer.train_queries())
        return self._add(all_tokens, layers, queries, session.layers[0].group_size)

    def contexts(self) -> list[ContextInfo]:
        """The stored contexts, in the order in which they came."""
        self._check_open()
        return [
            ContextInfo(context.id, context.num_tokens, context.num_bytes)
            for context in self._store.contexts()
        ]

    def delete(self, context_id: str) -> None:
        """Forgets a context. Sessions that use it go on; its bytes are freed with the last one.

        Raises:
            KeyError: there is no such context.
        """
        self._check_open()
        try:
            self._store.delete(context_id)
        except KeyError:
            known = ", ".join(context.id for context in self._store.contexts()) or "none"
            raise KeyError(f"no context {context_id!r}; stored: {known}") from None

    @property
    def skipped(self) -> dict[str, str]:
        """Path of each file of the folder that is damaged or of another model, and why it is left
        out."""
        return self._store.skipped

    @property
    def used_bytes(self) -> int:
        """Bytes of all contexts, those included that were deleted and are still used."""
        with self._lock:
            self._live.update(self._store.contexts())
            return sum(context.num_bytes for context in self._live)

    def close(self) -> None:
        """Lets go of all contexts; may be called again. Sessions that are open go on."""
        self._is_closed = True
        self._store.close()

    def __enter__(self) -> DB:
        self._check_open()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _stored(self, tokens: np.ndarray) -> StoredContext | None:
        self._check_open()
        context_id = context_id_of(tokens)
        return next((c for c in self._store.contexts() if c.id == context_id), None)

    def _tokens_of(self, session: Session, tokens: Any, num_tokens: int) -> np.ndarray:
        if num_tokens == 0:
            raise ValueError("session: holds no tokens yet; run the model first")
        if tokens is None:
            if num_tokens > len(session.tokens):
                raise ValueError(
                    f"session: holds {num_tokens} tokens, the prompt has {len(session.tokens)}: "
                    "give the ids of all tokens, store(session, tokens=model.generate(...))"
                )
            return session.tokens[:num_tokens]
        given = as_tokens("tokens", tokens)
        if len(given) < num_tokens:
            raise ValueError(
                f"tokens: {len(given)} ids for a session of {num_tokens} tokens; give the whole "
                "sequence, the prompt included"
            )
        shared = min(num_tokens, len(session.tokens))
        agreeing = common_prefix_len(given[:shared], session.tokens[:shared])
        if agreeing < shared:
            raise ValueError(
                f"tokens: id {given[agreeing]} at position {agreeing}, the prompt of the session "
                f"has {session.tokens[agreeing]} there; give the whole sequence, prompt included"
            )
        return given[:num_tokens]

    def _add(
        self,
        tokens: np.ndarray,
        layers: LayerElements,
        queries: list[list[Elements | None]],
        group: int,
    ) -> str:
        for i, layer in enumerate(layers):
            check_layer(i, layer)
        heads = [head for layer in layers for head in layer]
        self._check_room(sum(keys.data.nbytes + values.data.nbytes for keys, values in heads))
        built: list[list[HeadStates]] = []
        for i, layer in enumerate(layers):
            built.append([])
            for (keys, values), train in zip(layer, queries[i], strict=True):
                index, plan = build_index(i, keys, values, train, group, self.options, self._costs)
                built[-1].append(HeadStates(keys, values, index, train, plan))
        # one at a time, so that the memory limit holds; sessions are made meanwhile
        with self._adding:
            self._check_open()
            self._check_room(sum(num_bytes_of(head) for layer in built for head in layer))
            context = self._store.add(tokens, built)
        with self._lock:
            self._live.add(context)
        return context.id

    def _check_room(self, num_bytes: int) -> None:
        limit = self.options.memory_limit_bytes
        if limit is None or self._is_on_disk:
            return
        used = self.used_bytes
        if used + num_bytes > limit:
            raise DatabaseFullError(
                f"a context of {num_bytes} bytes besides {used} is more than memory_limit_bytes, "
                f"{limit}: delete() contexts or raise the limit"
            )

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("this database is closed: make a new DB")


def _open_store(path: str | Path | None, model: Any, options: DBOptions) -> ContextStore:
    if path is None:
        return MemoryContextStore()
    if path == "":
        raise ValueError(
            'path: given an empty path, expected a folder, or None; the current folder is "."'
        )
    if model is None:
        raise ValueError(
            f"DB({str(path)!r}) without a model: give model=, so that contexts of other models are "
            "not attended"
        )
    return DiskContextStore(Path(path), context_fingerprint(model), options.memory_limit_bytes)

# SPDX-License-Identifier: Apache-2.0
"""The contexts that a worker keeps, and the threads that build their indexes."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vllm_relay.config import RelayConfig
from vllm_relay.long_context.host.host_sequence import HostSequence
from vllm_relay.long_context.host.index_builders import Build, UnusableStatesError, index_heads
from vllm_relay.long_context.host.sequence_context import SequenceContext
from vllm_relay.long_context.orders import DELETED, ContextReport, KeptContext
from vllm_relay.sparse.contexts.context_fingerprint import ContextFingerprint
from vllm_relay.sparse.contexts.context_store import (
    ContextStore,
    Layers,
    MemoryContextStore,
    Parent,
    ParentGoneError,
    StoredContext,
)
from vllm_relay.sparse.contexts.disk.disk_context_store import DiskContext, DiskContextStore
from vllm_relay.sparse.index.query_types import Dipr
from vllm_relay.sparse.plan.options import DBOptions
from vllm_relay.sparse.plan.search_cost import SearchCost, load_costs

logger = logging.getLogger("vllm.relay")

MAX_LINKS = 32
MIN_LINK_TOKENS = 256
"""How many links the chain of a context may have: each is searched by itself in every step."""


class WorkerContexts:
    """Contexts by id: in memory at first, read by what was encoded for their requests; then with
    the indexes that were planned, and in a file if there is a folder.

    Args:
        path: of the folder; None keeps contexts in memory.
        builders: that build indexes, beside the steps of the engine.
    """

    def __init__(
        self,
        path: Path | None,
        fingerprint: ContextFingerprint,
        layer_names: Sequence[str],
        options: DBOptions,
        builders: ThreadPoolExecutor,
    ) -> None:
        self.layer_names = list(layer_names)
        self._store: ContextStore = (
            MemoryContextStore()
            if path is None
            else DiskContextStore(path, fingerprint, value_size=fingerprint.head_size)
        )
        self.options = options
        self._costs: SearchCost | None = None
        self._kept: dict[str, Build] = {}  # by context, of those that are not stored
        self._building: list[Build] = []  # also of those that were deleted meanwhile
        self._undeleted: dict[str, str] = {}  # stored contexts that cannot be deleted, and why
        self._is_closed = False
        self._lock = threading.Lock()
        self._built = threading.Condition(self._lock)
        self._storing = threading.Lock()
        self._builders = builders
        self._changed: list[str] = []

    @property
    def num_queued(self) -> int:
        """Contexts whose indexes are being built, or wait for it."""
        return len(self._building)

    def get(self, context_id: str) -> StoredContext | None:
        """The best there is of a context."""
        with self._lock:
            return self._contexts().get(context_id)

    def add(self, tokens: np.ndarray, layers: Layers, parent: Parent | None = None) -> None:
        """Stores a context; as a store."""
        self._store.add(tokens, layers, parent)

    def keep(
        self,
        kept: KeptContext,
        sequence: HostSequence,
        reused: StoredContext | None,
    ) -> bool:
        """Makes a context of a request that has ended, which continues the one that the request
        reused: nothing is copied. Its index is built later.

        Returns:
            whether it could be made: not behind one that is known to be damaged.
        """
        tokens = np.asarray(kept.tokens, np.int64)
        parent = None
        if sequence.begin:
            assert reused is not None
            if reused.damage is not None:
                logger.warning("context %s is not kept: %s", kept.context_id, reused.damage)
                return False
            parent = reused.first_tokens(sequence.begin)
        with self._lock:
            known = self._kept.get(kept.context_id)
            if known is not None and known.context is not None:
                return True
            context = SequenceContext(tokens, sequence, self.layer_names, parent)
            build = Build(context.id, tokens, self._lock, context)
            self._kept[build.context_id] = build
            self._building.append(build)
        build.future = self._builders.submit(self._run, build)
        return True

    def delete(self, context_id: str) -> str | None:
        """Forgets a context, here and in the folder. Requests that read it go on.

        Returns:
            why its file is still there, and so the context; None: it is not.
        """
        with self._lock:
            build = self._kept.pop(context_id, None)
            if build is not None:
                build.let_go()
                self._built.notify_all()
            self._delete_stored(context_id)
            return self._undeleted.get(context_id)

    def give_up(self, context_id: str, problem: str) -> None:
        """A request could not read the context: if it is not stored yet, nobody does any more."""
        with self._lock:
            build = self._kept.get(context_id)
            if build is not None and build.context is not None:
                self._refuse(build, problem)

    def reports(self) -> list[tuple[ContextReport, np.ndarray]]:
        """Of every context, with its tokens; of those that are not kept, and of those that were
        deleted while others continue them."""
        with self._lock:
            contexts = self._contexts()
            links = {
                link.context.id: link.context
                for each in contexts.values()
                for link in each.links(each.num_tokens)
            }
            refused = [each for each in self._kept.values() if each.context is None]
            return [
                *((self._report(each), each.tokens) for each in contexts.values()),
                *(
                    (replace(self._report(each), state=DELETED), each.tokens)
                    for each in links.values()
                    if each.id not in contexts
                ),
                *((_refusal(each), each.tokens) for each in refused),
            ]

    def take_changes(self) -> list[ContextReport]:
        """Of contexts whose indexes were built since the last call, or could not be."""
        if not self._changed:
            return []
        with self._lock:
            changed, self._changed = self._changed, []
        reports = [report for report, _ in self.reports()]
        return [each for each in reports if each.context_id in changed or each.state == DELETED]

    def close(self) -> None:
        """Nothing more is built for them; returns when nothing is written any more."""
        self._is_closed = True
        for build in list(self._building):
            if build.future is not None:
                build.future.cancel()
        with self._storing:
            self._store.close()

    def _contexts(self) -> dict[str, StoredContext]:
        """The best there is of each, without those that are stored in spite of their deletion,
        until their thread notices."""
        contexts: dict[str, StoredContext] = {
            build.context_id: build.context
            for build in self._kept.values()
            if build.context is not None
        }
        contexts |= {each.id: each for each in self._store.contexts()}
        for build in self._building:
            if build.context is None and self._is_last(build):
                contexts.pop(build.context_id, None)
        return contexts

    def _is_last(self, build: Build) -> bool:
        """Whether no other context was made of the same tokens since."""
        return self._kept.get(build.context_id) in (None, build)

    def _report(self, context: StoredContext) -> ContextReport:
        build = self._kept.get(context.id)
        problem = self._undeleted.get(context.id) if build is None else build.problem
        stored = context if isinstance(context, DiskContext) else None
        is_fresh = isinstance(context, SequenceContext)
        state = "indexing" if is_fresh and problem is None else "stored" if stored else "memory"
        return ContextReport(
            context_id=context.id,
            num_tokens=context.num_tokens,
            state=state,
            memory_bytes=0 if stored else context.num_bytes,
            file_bytes=stored.disk_bytes if stored else 0,
            problem=problem,
            parent_id=context.parent_id,
            num_own_tokens=context.num_tokens - context.own_begin,
        )

    def _refuse(self, build: Build, problem: str) -> None:
        build.let_go()
        build.problem = f"is not kept: {problem}"
        self._built.notify_all()

    def _run(self, build: Build) -> None:
        try:
            if build.context is not None:
                self._build(build)
        finally:
            with self._lock:
                self._building.remove(build)
                self._built.notify_all()
                self._changed.append(build.context_id)

    def _is_needed(self, build: Build) -> bool:
        return build.context is not None and not self._is_closed

    def _build(self, build: Build) -> None:
        context_id = build.context_id
        try:
            while not self._is_stored(build):
                logger.info("context %s: what it continues was deleted", context_id)
            with self._storing, self._lock:
                if build.context is not None:
                    del self._kept[context_id]
                elif self._is_last(build):
                    self._delete_stored(context_id)
        except UnusableStatesError as error:
            logger.warning("context %s is not kept: %s", context_id, error)
            with self._lock:
                if self._is_needed(build):
                    self._refuse(build, str(error))
        except Exception as error:
            logger.exception("context %s stays in memory", context_id)
            with self._lock:
                if self._is_needed(build):
                    build.problem = f"{type(error).__name__}: {error}"
                    build.parent, build.heads = None, []
                elif self._is_last(build):
                    self._delete_stored(context_id)

    def _is_stored(self, build: Build) -> bool:
        """Stores it, if it is wanted. False: what it was to continue was deleted meanwhile."""
        begin = self._find_parent(build)
        costs = self._costs = self._costs or load_costs()
        is_indexed = index_heads(build, begin, self.options, costs, lambda: not self._is_closed)
        with self._storing:
            with self._lock:
                parent, heads = build.parent, build.heads
            if is_indexed and self._is_needed(build):
                try:
                    self.add(build.tokens, heads, parent)
                except ParentGoneError:
                    return False
        return True

    def _find_parent(self, build: Build) -> int:
        """Finds what it continues in the store; where what it has itself begins."""
        with self._lock:  # the parent's thread has begun before this one
            self._built.wait_for(lambda: build.context is None or not self._continues_build(build))
            context = build.context
        parent = self._parent_of(context)
        with self._lock:
            if build.context is not None:
                build.parent, build.heads = parent, []
        return 0 if parent is None else parent.num_tokens

    def _continues_build(self, build: Build) -> bool:
        """Whether what it continues is being built."""
        assert build.context is not None
        continued = build.context.parent
        return continued is not None and any(
            each.context is continued.context for each in self._building
        )

    def _parent_of(self, context: SequenceContext | None) -> Parent | None:
        """What it continues in the store. None: it has to have all of its tokens itself."""
        if context is None or context.parent is None:
            return None
        parent = self._store.parent_here(context.parent)
        if parent is None:
            return None
        links = parent.context.links(parent.num_tokens)
        begin = own_begin([each.end for each in links], context.num_tokens)
        return parent.context.first_tokens(begin)

    def _delete_stored(self, context_id: str) -> None:
        self._undeleted.pop(context_id, None)
        try:
            with contextlib.suppress(KeyError):
                self._store.delete(context_id)
        except OSError as error:
            logger.warning("context %s cannot be deleted: %s", context_id, error)
            self._undeleted[context_id] = f"cannot be deleted: {error}"


def own_begin(link_ends: Sequence[int], num_tokens: int) -> int:
    """The first token that a context of `num_tokens` keeps itself, behind the links that it
    continues. What it takes over of their tokens is stored twice.

    Args:
        link_ends: where each ends and the next one begins, in order.

    A link of less than `MIN_LINK_TOKENS` is taken over. Where there would be more than `MAX_LINKS`,
    so are the last ones, as long as the next is shorter than those behind it: of what was taken
    over before, little is again, so that a token is stored a few times even after many turns.
    """
    ends = [0, *link_ends]
    while len(ends) > 1 and ends[-1] - ends[-2] < MIN_LINK_TOKENS:
        ends.pop()
    if len(ends) > MAX_LINKS:
        ends.pop()
        while len(ends) > 1 and ends[-1] - ends[-2] <= num_tokens - ends[-1]:
            ends.pop()
    return ends[-1]


def _refusal(build: Build) -> ContextReport:
    return ContextReport(build.context_id, len(build.tokens), "memory", 0, 0, build.problem)


def db_options(options: RelayConfig) -> DBOptions:
    """How stored contexts are indexed and asked."""
    given: dict[str, Any] = {"threads": 1, "max_dropped_mass": options.max_dropped_mass}
    if options.max_error is not None:
        given["max_error"] = options.max_error
    else:
        estimates = options.estimate_unread and options.max_dropped_mass is None
        if options.alpha > 0:
            given["query"] = Dipr(alpha=options.alpha, estimate=estimates)
        if options.alpha == 0 or options.max_dropped_mass is not None or estimates:
            given["index"] = "flat"  # all is read, or looked at: there is nothing to plan
    return DBOptions(**given)

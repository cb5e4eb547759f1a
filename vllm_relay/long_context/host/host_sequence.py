# SPDX-License-Identifier: Apache-2.0
"""Keys and values of a running request in host memory."""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_relay import _C
from vllm_relay.sparse.contexts.train_queries import TrainQueries
from vllm_relay.sparse.index.elements import DTYPES, check_finite, elements_of
from vllm_relay.sparse.index.flat import FlatIndex
from vllm_relay.sparse.index.sparse_layer import SparseLayer, sparse_layer, value_means

SEGMENT_TOKENS = 8192
"""Of an index; what comes behind the last one is in indexes of `GRANULE_TOKENS`."""
GRANULE_TOKENS = 1024
"""Fewer tokens than this at the end are attended one by one, without an index."""
LAYER_LAG_TOKENS = 32
"""Each layer makes its indexes so many tokens later than the one before it, up to a granule later
than the first: one step that makes those of all layers would keep all requests waiting."""
TRAIN_QUERIES_PER_KEY = 0.4
STEP_TOKENS = 4096
"""Of one layer: with 8 kv heads, two cores encode them in less than 0.1 s."""
COPIED_TOKENS_PER_ENCODED = 16
"""So many are copied in about the time in which one is encoded."""


@dataclass
class EncodingBudget:
    """Tokens that a step may encode: of all layers and requests together, each layer's counted.

    A step makes one index in any case, unless it copies much that others have computed, and more
    within `step_tokens` and the tokens of prompts that it computes: so indexes keep up with
    prompts, and a step that generates is never much longer.
    """

    step_tokens: float = STEP_TOKENS
    _earned_tokens: int = 0
    _taken_tokens: int = 0

    def renew(self) -> None:
        """A step begins."""
        self._earned_tokens = self._taken_tokens = 0

    def earn(self, num_tokens: int) -> None:
        """So many tokens of a prompt are written in a layer."""
        self._earned_tokens += num_tokens

    def copy(self, num_tokens: int) -> None:
        """So many tokens that others have computed are copied in a layer."""
        self._taken_tokens += num_tokens // COPIED_TOKENS_PER_ENCODED

    def take(self, num_tokens: int) -> bool:
        """Whether an index of so many tokens of a layer is made in this step."""
        taken_tokens = self._taken_tokens + num_tokens
        if self._taken_tokens and taken_tokens > self.step_tokens + self._earned_tokens:
            return False
        self._taken_tokens = taken_tokens
        return True


@dataclass(eq=False)
class Segment:
    """An index over the positions `begin` to `end` of a request.

    Attributes:
        layer: None where a key or value is NaN, infinite or too large for codes: there is no order
            among such scores. All of these positions are read, and answer as dense attention does.
    """

    begin: int
    end: int
    layer: SparseLayer | None


@dataclass(frozen=True)
class SequencePlace:
    """Which tokens of a request are copied to the host.

    Attributes:
        begin: the first one; those before it are a stored context's.
        capacity: how many there may be.
        sink_end: the tokens before it are always read, here or on the device.
        window_tokens: last ones that the device keeps.
        prompt_end: tokens of the prompt.
    """

    begin: int
    capacity: int
    sink_end: int
    window_tokens: int
    prompt_end: int


class HostLayer:
    """One layer of a request: keys and values of the tokens from `begin` on, by position.

    Attributes:
        begin: of the request; the tokens before it belong to a stored context.
        end: tokens up to here are written.
        keys, values: [kv_heads, capacity, size], of position `begin` and after. Memory is taken
            when it is first written.
        sink_end: as of its place.
        index_begin: the first position that an index has.
        segments: encoded so far, by `begin` and `end`.
        train_queries: that its keys have met, of a request that becomes a context.
        native: keys and values, as the C++ side has them.

    Args:
        place: of the sequence.
        lag_tokens: an index is made when so many tokens are behind its last one.
        budget: of the step; None: all is encoded at once.
    """

    def __init__(
        self,
        place: SequencePlace,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        lag_tokens: int = 0,
        budget: EncodingBudget | None = None,
    ) -> None:
        self.begin = self.end = place.begin
        shape = num_kv_heads, place.capacity, head_size
        self.keys, self.values = mapped_empty(shape, dtype), mapped_empty(shape, dtype)
        self.train_queries = TrainQueries(TRAIN_QUERIES_PER_KEY)
        keys, values = elements_of(self.keys), elements_of(self.values)
        self.native = _C.host.HostRows(keys.data, values.data, DTYPES.index(keys.dtype))
        self.sink_end = place.sink_end
        self.index_begin = max(place.begin, place.sink_end)
        self._prompt_end, self._window_tokens = place.prompt_end, place.window_tokens
        self._lag_tokens = lag_tokens
        self._budget = budget or EncodingBudget(math.inf)
        self.segments: dict[tuple[int, int], Segment] = {}

    def write(
        self,
        position: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        is_copied: bool = False,
    ) -> None:
        """
        Args:
            keys, values: [tokens, kv_heads, size], of `position` and after.
            is_copied: others have computed them. Nothing is encoded ahead then: copying takes long
                enough.
        """
        if position < self.end:  # the request began again, or tokens of it were rejected
            self.segments = {k: each for k, each in self.segments.items() if each.end <= position}
        first = position - self.begin
        last = first + keys.shape[0]
        self.keys[:, first:last] = keys.transpose(0, 1)
        self.values[:, first:last] = values.transpose(0, 1)
        self.end = position + keys.shape[0]
        if is_copied:
            self._budget.copy(keys.shape[0])
        elif position < self._prompt_end:
            self._budget.earn(keys.shape[0])
            self._index_ahead()

    def rows(self, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the positions `begin` to `end`: [kv_heads, tokens, size], views."""
        first, last = begin - self.begin, end - self.begin
        return self.keys[:, first:last], self.values[:, first:last]

    def segments_up_to(self, end: int) -> list[Segment]:
        """Adjacent, in order, from the first token on that is not always read.

        Which positions they may have follows from `end` and the layer, and a segment never changes:
        few tokens are encoded at a time, in the steps that compute them or soon after.
        """
        segments, at = [], self.index_begin
        end -= self._lag_tokens
        for num_tokens in (SEGMENT_TOKENS, GRANULE_TOKENS):
            while at + num_tokens <= end:
                key = at, at + num_tokens
                if key not in self.segments:
                    awaits_segment = num_tokens < SEGMENT_TOKENS <= end - at
                    if awaits_segment or not self._budget.take(num_tokens):
                        break
                    self.segments[key] = self._flat(*key)
                segments.append(self.segments[key])
                at += num_tokens
        if len(self.segments) > len(segments):
            self._drop_granules(segments)
        return segments

    def _drop_granules(self, segments: list[Segment]) -> None:
        """Those that have become a segment."""
        whole = [each for each in segments if each.end - each.begin == SEGMENT_TOKENS]
        end = whole[-1].end if whole else 0
        self.segments = {
            (begin, last): each
            for (begin, last), each in self.segments.items()
            if last > end or last - begin == SEGMENT_TOKENS
        }

    def _index_ahead(self) -> None:
        """Encodes while a prompt is computed what its first generated token would wait for."""
        begin = self.index_begin + self._lag_tokens
        num_tokens = self.end - self._window_tokens - begin
        if self.end < self._prompt_end:
            num_tokens -= num_tokens % SEGMENT_TOKENS
        self.segments_up_to(begin + num_tokens)

    def _flat(self, begin: int, end: int) -> Segment:
        keys, values = ([*map(elements_of, part)] for part in self.rows(begin, end))
        # not as many as the cores this thread may use: vLLM binds it to one of them
        threads = torch.get_num_threads()
        means = [value_means(head, threads) for head in values]
        try:
            for head in means:  # finite exactly where the values are
                check_finite("values", head)
            indexes = [FlatIndex().build(head, threads=threads) for head in keys]
        except ValueError:
            return Segment(begin, end, None)
        return Segment(begin, end, sparse_layer(indexes, values, means))


class HostSequence:
    """All layers of a request. Layers are made when they are first written.

    Args:
        budget: as of its layers.
    """

    def __init__(self, place: SequencePlace, budget: EncodingBudget | None = None) -> None:
        self.place = place
        self._budget = budget
        self.begin = place.begin
        self.layers: dict[str, HostLayer] = {}

    def layer(self, name: str, keys: torch.Tensor) -> HostLayer:
        """Args: keys: [tokens, kv_heads, size], of the layer."""
        if name not in self.layers:
            _, num_kv_heads, head_size = keys.shape
            lag = len(self.layers) * LAYER_LAG_TOKENS % GRANULE_TOKENS
            self.layers[name] = HostLayer(
                self.place, num_kv_heads, head_size, keys.dtype, lag, self._budget
            )
        return self.layers[name]


def mapped_empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """As torch.empty: pages are taken when they are first written.

    An allocator keeps what is freed below its threshold, which grows up to 32 MiB in glibc, and
    hands out pages that are in memory already: what requests take would grow beyond what is
    reserved for them.
    """
    num_elements = math.prod(shape)
    if num_elements == 0:
        return torch.empty(shape, dtype=dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, num_elements * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype, count=num_elements).view(shape)


def return_free_memory() -> None:
    """Gives back to the system what glibc's allocator keeps of freed memory: it grows up to 64 MiB
    for each thread that computes, beside what is reserved. Elsewhere nothing happens."""
    _trim()(0)


@functools.cache
def _trim() -> Callable[[int], object]:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):  # another C library
        return lambda padding_bytes: None

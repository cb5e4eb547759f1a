# SPDX-License-Identifier: Apache-2.0
"""What the entries of a step read together, in parts of which each leaves states of one kind.

Pure: numpy in, numpy out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vllm_relay.attention_backends.cuda.config import KernelSetup
from vllm_relay.attention_backends.forest import FIRST, LAST, Forest
from vllm_relay.attention_backends.ragged import starts

NOWHERE = int(np.iinfo(np.int32).max)
"""A position behind all tokens."""


@dataclass(frozen=True, eq=False)
class Spans:
    """Parts of spans, in token order for each entry; arrays of one element for each part."""

    setup: KernelSetup
    unit_tokens: int
    """Shared ranges end at multiples of it."""
    first: np.ndarray
    last: np.ndarray
    """Of the run of entries."""
    begin: np.ndarray
    end: np.ndarray
    row: np.ndarray
    """Of the block table."""
    node: np.ndarray
    """Which node of the forest, or behind them which request in the order of execution; ascends."""
    alone: np.ndarray
    """Whether the entries read nothing else, and of one segment."""
    final: np.ndarray
    """Whether nobody goes on where it ends."""

    @cached_property
    def tokens(self) -> np.ndarray:
        return self.end - self.begin

    @cached_property
    def rows(self) -> np.ndarray:
        """Of one kv head."""
        return (self.last - self.first) * self.setup.group_size

    @cached_property
    def height(self) -> np.ndarray:
        """Index of `setup.heights`."""
        return self.setup.height_of(self.rows)

    @cached_property
    def row_tiles(self) -> np.ndarray:
        return -(-self.rows // self.setup.heights[self.height])


def spans_of(
    forest: Forest,
    query_start_loc: np.ndarray,
    seq_lens: tuple[np.ndarray, np.ndarray],
    setup: KernelSetup,
    window_tokens: int,
    max_slots: int | None,
) -> Spans:
    """What is read; `plan.plan_step` lists the arguments, of which `seq_lens` is lower and upper
    bounds."""
    config, order, nodes = setup.config, forest.order, forest.nodes
    tile, segment, section = config.tile_tokens, config.segment_tokens, config.section_tokens
    lens = (query_start_loc[1:] - query_start_loc[:-1])[order]
    requests = np.arange(len(order))
    # behind the nodes, what requests read alone
    own = (requests, requests + 1, forest.shared_tokens[order], seq_lens[1][order], order)
    first, last, given_begin, given_end, row = np.concatenate((nodes.T, own), 1, dtype=np.int64)
    final = np.arange(len(row)) >= len(nodes)
    first_entry = starts(lens)
    first, last = first_entry[first], first_entry[last]
    if window_tokens:
        least = seq_lens[0][order] - lens + 1 - window_tokens
        of_requests = np.maximum(least, 0) // segment * segment
        of_nodes = _least_of_runs(np.where(lens > 0, of_requests, NOWHERE), nodes)
        seen_from = np.concatenate((of_nodes, of_requests))
    state_tokens = np.array([[tile], [segment], [section], [segment]])
    for unit in (tile, segment, section, NOWHERE):
        begin = shared = given_begin // unit * unit
        if window_tokens:
            begin = np.maximum(shared, seen_from)
        end = np.where(final, given_end, given_end // unit * unit)
        # the rest of a segment that another span has begun, segments of a section that is begun,
        # sections, and the segment that others will go on with
        whole = np.minimum(-(-begin // segment) * segment, end)
        rest = np.maximum(np.where(final, end, end // segment * segment), whole)
        section_begin = np.minimum(-(-whole // section) * section, rest)
        bounds = np.array((begin, whole, section_begin, rest, end))
        tokens = bounds[1:] - bounds[:-1]
        alone = final & (shared == 0) & (end - begin <= segment)
        if max_slots is None or unit == NOWHERE:
            break
        states = np.maximum(-(-tokens // state_tokens), 0).sum(axis=0)
        states[alone] = 0
        if (last - first) @ states <= max_slots:
            break
    node, part = ((tokens > 0) & (first < last)).T.nonzero()
    return Spans(
        setup=setup,
        unit_tokens=unit,
        first=first[node],
        last=last[node],
        begin=bounds[part, node],
        end=bounds[part + 1, node],
        row=row[node],
        node=node,
        alone=alone[node],
        final=final[node],
    )


def _least_of_runs(values: np.ndarray, nodes: np.ndarray) -> np.ndarray:
    """[nodes]: the least of `values`, one of each position in the order, that a node has."""
    runs = nodes[:, [FIRST, LAST]].ravel()
    return np.minimum.reduceat(np.append(values, NOWHERE), runs)[::2]

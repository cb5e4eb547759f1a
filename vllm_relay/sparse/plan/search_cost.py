# SPDX-License-Identifier: Apache-2.0
"""What a search costs on this machine: what ships, and what `vllm-relay tune --sparse` has
measured."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from vllm_relay.attention_backends.cuda.config import tuned_path
from vllm_relay.processor import cpu_name
from vllm_relay.sparse.index.key_codes import row_bytes

KINDS = ("full", "flat", "coarse", "graph")
"""Ways to attend a context; "full" reads all of it, without an index."""
CODE_BYTES, ROW_BYTES = 128, 256
"""Of one key in the measurements: of its code, and of itself in 16 bits."""
SHIPPED_COSTS = Path(__file__).with_name("shipped_costs.json")
"""Measured on the machine of docs/benchmarks.md."""
FILE_FORMAT = 1
_FORMER_FIELD = "build_us"
"""What building costs: in files of former versions, and nobody's need."""


@dataclass(frozen=True)
class SearchWork:
    """What one search of the queries of a group does, and the attention over what it found.

    Attributes:
        kind: one of `KINDS`.
        group: queries.
        distances: keys whose codes are scored, each once for all queries.
        hops: graph nodes expanded, or lists read.
        centres: of lists, of which each query chooses the best.
        rescored, found: keys scored exactly, and attended; summed over the queries.
        filtered_hops: of hops through a graph, those to keys behind the prefix, whose neighbours
            stand in for them; in proportion.
    """

    kind: str
    num_keys: int
    group: int
    distances: float = 0.0
    hops: float = 0.0
    centres: float = 0.0
    rescored: float = 0.0
    found: float = 0.0
    filtered_hops: float = 0.0


@dataclass(frozen=True)
class KindCost:
    """What the parts of `SearchWork` cost for one kind of index of one size, for keys of
    `CODE_BYTES` and `ROW_BYTES`."""

    call_us: float = 0.0
    query_us: float = 0.0
    distance_ns: float = 0.0
    distance_query_ns: float = 0.0
    hop_ns: float = 0.0
    hop_query_ns: float = 0.0
    centre_query_ns: float = 0.0
    rescored_ns: float = 0.0
    found_ns: float = 0.0
    filtered_hop_ns: float = 0.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if type(value) not in (int, float) or not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value!r}, expected a number from 0")

    def time_us(self, work: SearchWork, code_scale: float, row_scale: float) -> float:
        """Args: code_scale, row_scale: how many times larger codes and rows are than those
        measured."""
        return (
            self.call_us
            + self.query_us * work.group
            + 1e-3
            * (
                code_scale
                * work.distances
                * (self.distance_ns + self.distance_query_ns * work.group)
                + work.hops * (self.hop_ns + self.hop_query_ns * work.group)
                + work.filtered_hops * self.filtered_hop_ns
                + work.centres * work.group * self.centre_query_ns
                + row_scale * (work.rescored * self.rescored_ns + work.found * self.found_ns)
            )
        )


@dataclass(frozen=True)
class SearchCost:
    """Costs of each kind of index at some sizes: small ones lie in a cache, large ones do not.

    Attributes:
        sizes: numbers of keys, rising, at which `kinds[kind]` was measured; between them times are
            interpolated by the logarithm of the size of the codes.

    Raises:
        ValueError: a kind is missing, or the numbers of sizes and costs differ.
    """

    sizes: tuple[int, ...]
    kinds: Mapping[str, tuple[KindCost, ...]]

    def __post_init__(self) -> None:
        if not self.sizes or list(self.sizes) != sorted(set(self.sizes)) or self.sizes[0] < 1:
            raise ValueError(f"sizes are {self.sizes}, expected rising numbers of keys")
        if set(self.kinds) != set(KINDS):
            raise ValueError(f"costs of {', '.join(self.kinds)}, expected {', '.join(KINDS)}")
        for kind, costs in self.kinds.items():
            if len(costs) != len(self.sizes):
                raise ValueError(f"{kind}: {len(costs)} costs, expected {len(self.sizes)}")

    def time_us(self, work: SearchWork, *, head_size: int = 128, key_bytes: int = 256) -> float:
        """Of one thread, for a search and the attention over what it finds.

        Args:
            key_bytes: of one key as stored.

        Raises:
            ValueError: no such kind, or no query.
        """
        if work.kind not in self.kinds or work.group < 1:
            raise ValueError(
                f"a search of kind {work.kind!r} for {work.group} queries, expected one of "
                f"{', '.join(KINDS)} for at least 1"
            )
        code_scale, row_scale = row_bytes(head_size) / CODE_BYTES, key_bytes / ROW_BYTES
        return sum(
            share * cost.time_us(work, code_scale, row_scale)
            for share, cost in self._between(work.kind, work.num_keys * code_scale)
        )

    def to_json(self) -> dict[str, Any]:
        kinds = {kind: [asdict(cost) for cost in costs] for kind, costs in self.kinds.items()}
        return {"sizes": list(self.sizes), "kinds": kinds}

    @classmethod
    def from_json(cls, content: Any) -> SearchCost:
        """Raises ValueError: not what `to_json` returned."""
        known = {field.name for field in fields(KindCost)}
        try:
            kinds = {}
            for kind, entries in content["kinds"].items():
                for entry in entries:
                    entry.pop(_FORMER_FIELD, None)
                    if set(entry) != known:
                        raise ValueError(f"{kind} has the fields {', '.join(entry)}")
                kinds[kind] = tuple(KindCost(**entry) for entry in entries)
            return cls(tuple(content["sizes"]), kinds)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"costs of searches: {error!r} is missing or unusable") from None

    def _between(self, kind: str, size: float) -> list[tuple[float, KindCost]]:
        """Costs and their shares, which sum to 1."""
        costs = self.kinds[kind]
        if size <= self.sizes[0]:
            return [(1.0, costs[0])]
        for i in range(1, len(self.sizes)):
            low, high = self.sizes[i - 1], self.sizes[i]
            if size <= high:
                share = math.log(size / low) / math.log(high / low)
                return [(1 - share, costs[i - 1]), (share, costs[i])]
        return [(1.0, costs[-1])]


def costs_path(folder: Path | None = None) -> Path:
    """The file of this kind of CPU."""
    return tuned_path(f"sparse {cpu_name()}", folder)


def load_costs(folder: Path | None = None) -> SearchCost:
    """What was measured on this kind of CPU, or else what ships. Raises ValueError: the file cannot
    be used; the message says why.

    Args:
        folder: $VLLM_RELAY_CACHE or the user's cache unless given.
    """
    path = costs_path(folder)
    return read_costs(path if path.exists() else SHIPPED_COSTS)


def read_costs(path: Path) -> SearchCost:
    """The costs in a file that `write_costs` made. Raises ValueError: the file is no such file; the
    message names it."""
    try:
        content = json.loads(path.read_text())
        if not isinstance(content, dict) or content.get("format") != FILE_FORMAT:
            raise ValueError(f"expected format {FILE_FORMAT}")
        return SearchCost.from_json(content)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path}: not a file of search costs ({error}); run `vllm-relay tune --sparse` again, "
            "or remove it to use what ships"
        ) from None


def write_costs(path: Path, costs: SearchCost, facts: Mapping[str, Any]) -> None:
    """Stores costs with what they were measured on, in place of what is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"format": FILE_FORMAT, **facts, **costs.to_json()}, indent=2)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(text + "\n")
    draft.replace(path)

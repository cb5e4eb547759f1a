# SPDX-License-Identifier: Apache-2.0
"""Sizes and costs of the Triton kernels: what ships, and what `vllm-relay tune` has measured."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vllm_relay.attention_backends.cost import KernelCost

FLOPS_PER_BYTE = 80.0
"""What a multiprocessor multiplies while it reads a byte: half of the peak of an H200's matrix unit
over its bandwidth, by counting; nothing was measured."""

POWERS_OF_TWO = {"tile_tokens": 16, "small_rows": 16, "large_rows": 16, "num_warps": 1}
"""Fields that have to be one, and the least: what the matrix unit takes."""

MAX_QUERY_TILE_BYTES, MAX_KV_TILE_BYTES = 32 << 10, 16 << 10
"""128 rows, and 64 tokens, of heads of size 128 in 16 bits."""
MAX_STATE_FLOATS_PER_WARP = 2048
"""64 registers of each thread: a tile's state, beside that of its segment."""


@dataclass(frozen=True)
class KernelConfig:
    """One way to compile and launch the kernels on one kind of GPU.

    `tile_tokens`, `segment_tokens` and `section_tokens` are where sums over tokens are cut: results
    of configurations that differ in them may differ in their last bits.
    """

    tile_tokens: int = 64
    """KV tokens that pass the matrix unit at once."""
    segment_tokens: int = 512
    """A state is computed in one go up to here, and may be computed by one program per segment."""
    section_tokens: int = 4096
    """Where there is enough to do, one program folds the segments of a section."""
    small_rows: int = 64
    """Rows of the tile that ranges of few rows take."""
    large_rows: int = 128
    num_warps: int = 8
    num_stages: int = 3
    """Tiles of tokens in shared memory, all but one on their way while one is computed."""
    large_stages: int | None = None
    """The same, with tiles of 64 rows and more, if they are others."""
    programs_per_sm: int = 1
    state_cost: float = 0.5
    """Writing and reading a state, over reading as many bytes of KV."""
    start_tokens: float = 32.0
    """Starting a range costs as much as reading this many tokens."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            is_whole = type(value) is int and value > 0
            if least := POWERS_OF_TWO.get(name):
                if not is_whole or value < least or value & (value - 1):
                    raise ValueError(f"{name} is {value!r}, expected a power of two from {least}")
            elif name in ("state_cost", "start_tokens"):
                if type(value) not in (int, float) or not 0 <= value < float("inf"):
                    raise ValueError(f"{name} is {value!r}, expected a number from 0")
            elif not is_whole and (name, value) != ("large_stages", None):
                raise ValueError(f"{name} is {value!r}, expected a whole number from 1")
        if self.segment_tokens % self.tile_tokens or self.section_tokens % self.segment_tokens:
            raise ValueError(
                "a section must be whole segments, and a segment whole tiles: got "
                f"{self.section_tokens}, {self.segment_tokens} and {self.tile_tokens} tokens"
            )
        if self.large_rows < self.small_rows:
            raise ValueError(
                f"large_rows is {self.large_rows}, expected at least small_rows, {self.small_rows}"
            )

    def for_head_size(self, head_size: int, itemsize: int = 2) -> KernelConfig:
        """This, with tiles that fit in registers and shared memory.

        Args:
            itemsize: bytes per element of queries.
        """
        padded = 1 << (head_size - 1).bit_length()
        if padded > 128 and self.programs_per_sm > 1:  # one with the registers of all
            whole = replace(
                self, num_warps=max(8, self.num_warps), large_stages=None, programs_per_sm=1
            )
            return whole.for_head_size(head_size, itemsize)
        rows = min(
            MAX_QUERY_TILE_BYTES // (padded * itemsize),
            MAX_STATE_FLOATS_PER_WARP * self.num_warps // padded,
        )
        large_rows = min(self.large_rows, max(16, rows))
        return replace(
            self,
            tile_tokens=min(self.tile_tokens, max(16, MAX_KV_TILE_BYTES // (padded * itemsize))),
            large_rows=large_rows,
            small_rows=min(self.small_rows, large_rows),
        )

    def for_kv_bytes(self, kv_bytes: int) -> KernelConfig:
        """This, with one height of tiles where the results of two were seen to differ: of fp8."""
        return replace(self, small_rows=self.large_rows) if kv_bytes == 1 else self

    def cost(self, head_size: int, kv_bytes: int) -> KernelCost:
        """What items cost, in the time that one program takes to read a token of one kv head.

        Args:
            kv_bytes: bytes per element of the KV cache.
        """
        state_bytes, token_bytes = 2 * 4 * (head_size + 2), 2 * head_size * kv_bytes
        return KernelCost(
            self.small_rows,
            stream_ns=1.0,
            tile_ns=4 * self.small_rows * head_size / (token_bytes * FLOPS_PER_BYTE),
            row_ns=0.0,
            start_tokens=self.start_tokens,
            state_ns=self.state_cost * state_bytes / token_bytes,
        )


class LayerShape(NamedTuple):
    """What a layer looks like to those who launch its kernels."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    kv_bytes: int
    """Per element of the KV cache."""


@dataclass(frozen=True)
class KernelSetup:
    """How the kernels are launched for layers of one shape on one device."""

    config: KernelConfig
    """For this head size."""
    cost: KernelCost
    num_heads: int
    num_kv_heads: int
    head_size: int
    num_programs: int
    """Of the attention kernel."""

    @staticmethod
    def of(config: KernelConfig, layer: LayerShape, num_sms: int) -> KernelSetup:
        """With tiles that fit the layer, and programs for so many multiprocessors."""
        config = config.for_head_size(layer.head_size, max(2, layer.kv_bytes))
        cost = config.cost(layer.head_size, layer.kv_bytes)
        num_heads, num_kv_heads, head_size, _ = layer
        num_programs = num_sms * config.programs_per_sm
        return KernelSetup(config, cost, num_heads, num_kv_heads, head_size, num_programs)

    @property
    def group_size(self) -> int:
        """Query heads per kv head."""
        return self.num_heads // self.num_kv_heads

    @cached_property
    def heights(self) -> np.ndarray:
        """int [2]: rows of the small tile and of the large one."""
        return np.array([self.config.small_rows, self.config.large_rows])

    def height_of(self, rows: np.ndarray) -> np.ndarray:
        """Which of `heights` so many rows of a kv head take; elementwise."""
        return (rows > self.config.small_rows).astype(np.intp)

    @cached_property
    def height_costs(self) -> tuple[np.ndarray, np.ndarray]:
        """float [2], twice: what either tile costs per token, and whatever its tokens, its states
        left out."""
        start_ns = self.cost.start_ns(self.heights) - self.heights * self.cost.state_ns
        return self.cost.token_ns(self.heights), start_ns

    def items_ns(
        self, height: np.ndarray, rows: np.ndarray, tokens: np.ndarray, states: np.ndarray
    ) -> np.ndarray:
        """What items cost the programs that do them; elementwise.

        Args:
            height: which of `heights`.
            rows: of the tile and those behind it.
            states: of each row. Half of what they cost is reading them, by all programs alike.
        """
        token_ns, start_ns = (each[height] for each in self.height_costs)
        written = np.minimum(rows, self.heights[height]) * states / 2
        return tokens * token_ns + start_ns + written * self.cost.state_ns


# Two heights of rows only where the matrix instructions of both round alike: sm_80 has one
# instruction for all heights. sm_90 has mma.sync for 16 rows and wgmma for 64: they did on an H100,
# unless keys and values were fp8. Of sm_100's nothing is known.
_AMPERE = KernelConfig(tile_tokens=32, small_rows=16, large_rows=64, num_warps=4, programs_per_sm=2)
_LITTLE_SHARED_MEMORY = replace(_AMPERE, num_stages=2, programs_per_sm=1)
SHIPPED = {
    80: _AMPERE,
    86: _LITTLE_SHARED_MEMORY,
    90: KernelConfig(small_rows=16, large_rows=64),
    100: KernelConfig(small_rows=64, large_rows=64, num_warps=4),
    120: _LITTLE_SHARED_MEMORY,
}
"""By compute capability, 90 for sm_90; a GPU takes the newest that is not newer than itself."""


def shipped_for(capability: tuple[int, int]) -> KernelConfig:
    """What ships for a GPU of compute capability (9, 0), say."""
    number = capability[0] * 10 + capability[1]
    return SHIPPED[max((key for key in SHIPPED if key <= number), default=min(SHIPPED))]


def config_for(
    gpu_name: str, capability: tuple[int, int], *, head_size: int, kv_bytes: int
) -> KernelConfig:
    """What was measured for this GPU and shape of KV cache, or else what ships.

    Args:
        gpu_name: as CUDA reports it, "NVIDIA H200".
        capability: (9, 0) for sm_90.
        kv_bytes: bytes per element of the KV cache.

    Raises:
        ValueError: the file of measured configurations cannot be used; the message says why.
    """
    tuned = read_tuned(tuned_path(gpu_name))
    found = tuned.configs.get(config_key(head_size, kv_bytes))
    return (found or shipped_for(capability)).for_kv_bytes(kv_bytes)


def faster_kernels(gpu_name: str, *, head_size: int, kv_bytes: int) -> str | None:
    """ "flash" or "triton", whichever was measured to be faster here; None: neither was measured.

    Args and errors are those of `config_for`.
    """
    return read_tuned(tuned_path(gpu_name)).faster.get(config_key(head_size, kv_bytes))


def config_key(head_size: int, kv_bytes: int) -> str:
    """Under which a configuration is stored: heads are padded to powers of two."""
    return f"head_size {1 << (head_size - 1).bit_length()}, {kv_bytes} bytes"


def tuned_folder() -> Path:
    """Where measured configurations are kept: $VLLM_RELAY_CACHE, or the user's cache."""
    if given := os.environ.get("VLLM_RELAY_CACHE"):
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "vllm_relay"


def tuned_path(gpu_name: str, folder: Path | None = None) -> Path:
    """The file of one kind of GPU."""
    slug = re.sub(r"[^A-Za-z0-9]+", "-", gpu_name).strip("-").lower()
    return (folder or tuned_folder()) / f"{slug}.json"


@dataclass
class Tuned:
    """What was measured on one kind of GPU, by `config_key`."""

    configs: dict[str, KernelConfig] = field(default_factory=dict)
    faster: dict[str, str] = field(default_factory=dict)
    """"flash" or "triton"."""


def read_tuned(path: Path) -> Tuned:
    """What is in a file that `write_tuned` made; nothing where there is none.

    Raises:
        ValueError: the file is no such file; the message names it.
    """
    if not path.exists():
        return Tuned()
    known = {each.name for each in fields(KernelConfig)}
    try:
        content = json.loads(path.read_text())
        tuned = Tuned(faster=content.get("faster", {}))
        if unknown := set(tuned.faster.values()) - {"flash", "triton"}:
            raise ValueError(f"faster is {', '.join(map(repr, sorted(unknown)))}")
        for key, values in content["configs"].items():
            if unknown := values.keys() - known:
                raise ValueError(f"{key} has unknown fields {', '.join(sorted(unknown))}")
            tuned.configs[key] = KernelConfig(**values)
        return tuned
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{path}: not a file of kernel configurations ({error}); run `vllm-relay tune` again, "
            "or remove it to use what ships"
        ) from None


def write_tuned(
    path: Path,
    configs: dict[str, KernelConfig],
    facts: dict[str, Any],
    faster: dict[str, str] | None = None,
) -> None:
    """Store configurations, and which kernels are faster, with what they were measured on; what is
    there already stays, but for the same keys. A file that cannot be used is replaced."""
    try:
        kept = read_tuned(path)
    except ValueError:
        kept = Tuned()
    others = {key: name for key, name in kept.faster.items() if key not in configs}
    content = {
        **facts,
        "configs": {key: asdict(config) for key, config in {**kept.configs, **configs}.items()},
        "faster": {**others, **(faster or {})},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(content, indent=2) + "\n")
    draft.replace(path)

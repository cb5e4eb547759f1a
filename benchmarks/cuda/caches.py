# SPDX-License-Identifier: Apache-2.0
"""KV caches in which every slot that nobody may read is NaN."""

import numpy as np
import torch

from benchmarks.attention.batches import Batch
from benchmarks.cuda.geometry import Geometry
from benchmarks.cuda.inputs import FP8_SCALES


def poisoned_cache(
    batch: Batch,
    geometry: Geometry,
    device: str,
    *,
    seed: int,
    key_factor: float = 1.0,
    poison: bool = True,
) -> torch.Tensor:
    """[num_blocks, num_kv_heads, block_size, 2 * head_size] with random keys and values in the
    slots of the batch; fp8 caches hold them divided by their scales. Without `poison`, the same
    with random numbers in all other slots too."""
    shape = geometry.kv_shape(batch.num_blocks)
    generator = torch.Generator(device).manual_seed(seed)
    numbers = torch.randn(shape, generator=generator, device=device)
    numbers[..., : geometry.head_size] *= key_factor
    if geometry.is_fp8:
        numbers[..., : geometry.head_size] /= FP8_SCALES[0]
        numbers[..., geometry.head_size :] /= FP8_SCALES[1]
    if poison:
        is_used = torch.from_numpy(used_slots(batch)).to(device)
        numbers.masked_fill_(~is_used[:, None, :, None], torch.nan)
    return numbers.to(geometry.kv_dtype)


def used_slots(batch: Batch) -> np.ndarray:
    """bool [num_blocks, block_size]: slots that hold a token of some request."""
    columns = np.arange(batch.block_table.shape[1])
    tokens = np.clip(
        batch.seq_lens[:, None] - columns[None] * batch.block_size, 0, batch.block_size
    )
    used_tokens = np.zeros(batch.num_blocks, np.int64)
    np.maximum.at(used_tokens, batch.block_table[tokens > 0], tokens[tokens > 0])
    used_tokens[0] = 0
    return np.arange(batch.block_size)[None] < used_tokens[:, None]

# SPDX-License-Identifier: Apache-2.0
"""Parts of the attention kernel for tokens that some rows of a tile do not see (`hidden_bits.py`).

What a row hides are bits, 64 tokens in a word. A tile of tokens lies within one word.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_relay.attention_backends.cuda import hidden_bits as gpu_hidden

WORD: tl.constexpr = tl.constexpr(gpu_hidden.WORD_TOKENS)
SEES_ALL: tl.constexpr = tl.constexpr(gpu_hidden.SEES_ALL)
NO_TOKEN: tl.constexpr = tl.constexpr(gpu_hidden.SEES_ALL - 1)
"""Instead of a row of bits, for rows of a tile that belong to no query token."""


@triton.jit
def load_hidden(bits_ptr, bits_row, tile_begin, end_token, stride, TILE: tl.constexpr):
    """int64 [ROWS], a bit for each token of the tile that begins at `tile_begin`: 1 for those that
    a row does not see. Rows that belong to no query token see none."""
    tl.static_assert(WORD % TILE == 0, "a tile of tokens lies within one word")
    hides = (bits_row >= 0) & (tile_begin < end_token)
    pointers = bits_ptr + bits_row.to(tl.int64) * stride + tile_begin // WORD
    word = tl.load(pointers, mask=hides, other=0) >> (tile_begin % WORD)
    return tl.where(bits_row == NO_TOKEN, -1, word)


@triton.jit
def without_hidden(blocks, word, TILE: tl.constexpr):
    """The KV blocks of a tile's tokens, with -1 for tokens that no row sees: keys and values there
    may be anything, NaN included, and must not even be multiplied by zero."""
    seen = tl.reduce_or(~word, 0)
    is_seen = ((seen >> tl.arange(0, TILE)) & 1) != 0
    return tl.where(is_seen, blocks, -1)


@triton.jit
def hide(product, word, TILE: tl.constexpr):
    """Scores of a tile's rows and tokens, with -inf where a row does not see a token."""
    bits = word[:, None] >> tl.arange(0, TILE)[None, :]
    return tl.where((bits & 1) != 0, -float("inf"), product)

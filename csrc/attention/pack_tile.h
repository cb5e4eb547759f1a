// SPDX-License-Identifier: Apache-2.0
// Packs the keys and values of a tile of tokens as a KV cache has them (docs/kernels.md, 6).
#pragma once

#include <cstring>

#include "problem.h"
#include "vec16.h"

namespace relay {
namespace {

#if defined(__AVX512F__)

// rows[i][j] -> rows[j][i]
RELAY_INLINE void transpose16(__m512i (&rows)[16]) {
  __m512i pairs[16], quads[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  // quads[4 k + c]: column 4 lane + c of the rows 4 k to 4 k + 3, for each lane of 128 bits
#pragma GCC unroll 4
  for (int k = 0; k < 16; k += 4) {
    quads[k] = _mm512_unpacklo_epi64(pairs[k], pairs[k + 2]);
    quads[k + 1] = _mm512_unpackhi_epi64(pairs[k], pairs[k + 2]);
    quads[k + 2] = _mm512_unpacklo_epi64(pairs[k + 1], pairs[k + 3]);
    quads[k + 3] = _mm512_unpackhi_epi64(pairs[k + 1], pairs[k + 3]);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512i low_even = _mm512_shuffle_i32x4(quads[c], quads[4 + c], 0x88);
    const __m512i low_odd = _mm512_shuffle_i32x4(quads[c], quads[4 + c], 0xdd);
    const __m512i high_even = _mm512_shuffle_i32x4(quads[8 + c], quads[12 + c], 0x88);
    const __m512i high_odd = _mm512_shuffle_i32x4(quads[8 + c], quads[12 + c], 0xdd);
    rows[c] = _mm512_shuffle_i32x4(low_even, high_even, 0x88);
    rows[8 + c] = _mm512_shuffle_i32x4(low_even, high_even, 0xdd);
    rows[4 + c] = _mm512_shuffle_i32x4(low_odd, high_odd, 0x88);
    rows[12 + c] = _mm512_shuffle_i32x4(low_odd, high_odd, 0xdd);
  }
}

template <class T>
RELAY_INLINE void store_key_line(T* to, __m512i line) {  // 16 tokens x 4 bytes of dims
  if constexpr (sizeof(T) == 2 && kPack<T> == 1) {
    __m256i* lines = reinterpret_cast<__m256i*>(to);
    _mm256_storeu_si256(lines, _mm512_cvtepi32_epi16(line));
    _mm256_storeu_si256(lines + 1, _mm512_cvtepi32_epi16(_mm512_srli_epi32(line, 16)));
  } else {
    _mm512_storeu_si512(to, line);
  }
}

// The keys of 16 tokens: [head_size / pack][16 tokens][pack dims].
template <class T>
void pack_keys16(const T* const* keys, int head_size, T* to) {
  constexpr int kLineDims = 4 / sizeof(T), kStep = kLanes * kLineDims;
  for (int d = 0; d < head_size; d += kStep) {
    const int lines = (head_size - d) / kLineDims < kLanes ? (head_size - d) / kLineDims : kLanes;
    const auto mask = static_cast<__mmask16>((1u << lines) - 1);
    __m512i rows[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) rows[i] = _mm512_maskz_loadu_epi32(mask, keys[i] + d);
    transpose16(rows);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i)
      if (i < lines) store_key_line(to + (d + i * kLineDims) * kLanes, rows[i]);
  }
}

// 16 dims of kPack neighbouring tokens, side by side.
template <class T>
RELAY_INLINE void pack_value_line(const T* const* values, int dim, T* to) {
  if constexpr (kPack<T> == 2) {
    const auto load = [&](const T* from) {
      return _mm512_cvtepu16_epi32(
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + dim)));
    };
    _mm512_storeu_si512(to,
                        _mm512_or_si512(load(values[0]), _mm512_slli_epi32(load(values[1]), 16)));
  } else {
    std::memcpy(to, values[0] + dim, kLanes * sizeof(T));
  }
}

#else

template <class T>
void pack_keys16(const T* const* keys, int head_size, T* to) {
  constexpr int kStep = kPack<T>;
  for (int d = 0; d < head_size; d += kStep)
    for (int i = 0; i < kLanes; ++i)
      std::memcpy(to + d * kLanes + i * kStep, keys[i] + d, kStep * sizeof(T));
}

template <class T>
RELAY_INLINE void pack_value_line(const T* const* values, int dim, T* to) {
  constexpr int kStep = kPack<T>;
  for (int d = 0; d < kLanes; ++d)
    for (int i = 0; i < kStep; ++i) to[d * kStep + i] = values[i][dim + d];
}

#endif

// Packs kTileTokens tokens into a block of `block_size` tokens; `offset` is the place of the first,
// a multiple of kTileTokens.
template <class T>
void pack_tile(const T* const* keys, const T* const* values, int head_size, int block_size,
               int offset, T* block) {
  for (int i = 0; i < kTileTokens; i += kLanes)
    pack_keys16(keys + i, head_size, block + int64_t{offset + i} * head_size);
  for (int dim = 0; dim < head_size; dim += kLanes) {
    T* to = block + int64_t{block_size} * (head_size + dim) + int64_t{offset} * kLanes;
    for (int i = 0; i < kTileTokens; i += kPack<T>)
      pack_value_line(values + i, dim, to + i * kLanes);
  }
}

}  // namespace
}  // namespace relay

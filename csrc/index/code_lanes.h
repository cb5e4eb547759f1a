// SPDX-License-Identifier: Apache-2.0
// Inner products of unsigned 8-bit key codes with signed 8-bit query codes, for rows that lie
// anywhere in memory. `Chunks` is the length of a row in units of 64 bytes.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512VNNI__)
#include <immintrin.h>
#endif

#ifndef RELAY_INLINE
#define RELAY_INLINE __attribute__((always_inline)) inline
#endif

namespace relay::index {
namespace {

constexpr int kRowsAtOnce = 16;
constexpr int kQuad = 4;  // queries that are scored together

}  // namespace
}  // namespace relay::index

#if defined(__AVX2__) && !defined(__AVX512VNNI__)
#include "code_lanes_avx2.h"
#endif

namespace relay::index {
namespace {

#if defined(__AVX512VNNI__)

// Sums the lanes of each of four registers: returns [a, b, c, d] in every 128-bit part.
RELAY_INLINE __m512i sum_within_parts(__m512i a, __m512i b, __m512i c, __m512i d) {
  const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  return _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
}

// Of four results of that, the sums of all sixteen.
RELAY_INLINE void store_sums(const __m512i* parts, int32_t* out) {
  const __m512i low = _mm512_add_epi32(_mm512_shuffle_i32x4(parts[0], parts[1], 0x44),
                                       _mm512_shuffle_i32x4(parts[0], parts[1], 0xee));
  const __m512i high = _mm512_add_epi32(_mm512_shuffle_i32x4(parts[2], parts[3], 0x44),
                                        _mm512_shuffle_i32x4(parts[2], parts[3], 0xee));
  _mm512_storeu_si512(out, _mm512_add_epi32(_mm512_shuffle_i32x4(low, high, 0x88),
                                            _mm512_shuffle_i32x4(low, high, 0xdd)));
}

// One query, sixteen rows.
template <int Chunks>
RELAY_INLINE void dot_rows(const uint8_t* const* rows, const int8_t* query, int32_t* out) {
  __m512i q[Chunks], parts[4];
#pragma GCC unroll 4
  for (int c = 0; c < Chunks; ++c) q[c] = _mm512_loadu_si512(query + 64 * c);
#pragma GCC unroll 4
  for (int four = 0; four < 4; ++four) {
    __m512i sums[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      sums[r] = _mm512_setzero_si512();
#pragma GCC unroll 4
      for (int c = 0; c < Chunks; ++c)
        sums[r] =
            _mm512_dpbusd_epi32(sums[r], _mm512_loadu_si512(rows[4 * four + r] + 64 * c), q[c]);
    }
    parts[four] = sum_within_parts(sums[0], sums[1], sums[2], sums[3]);
  }
  store_sums(parts, out);
}

// Of [query][row] of four rows each, [query][row] of all sixteen.
RELAY_INLINE void store_quad(const __m512i* parts, int32_t (*out)[kRowsAtOnce]) {
  const __m512i a = _mm512_shuffle_i32x4(parts[0], parts[1], 0x44);
  const __m512i b = _mm512_shuffle_i32x4(parts[2], parts[3], 0x44);
  const __m512i c = _mm512_shuffle_i32x4(parts[0], parts[1], 0xee);
  const __m512i d = _mm512_shuffle_i32x4(parts[2], parts[3], 0xee);
  _mm512_storeu_si512(out[0], _mm512_shuffle_i32x4(a, b, 0x88));
  _mm512_storeu_si512(out[1], _mm512_shuffle_i32x4(a, b, 0xdd));
  _mm512_storeu_si512(out[2], _mm512_shuffle_i32x4(c, d, 0x88));
  _mm512_storeu_si512(out[3], _mm512_shuffle_i32x4(c, d, 0xdd));
}

// Four queries whose 16-byte pieces alternate (`interleave_quad`), sixteen rows.
template <int Chunks>
RELAY_INLINE void dot_rows_quad(const uint8_t* const* rows, const int8_t* quad,
                                int32_t (*out)[kRowsAtOnce]) {
  __m512i parts[4];
#pragma GCC unroll 4
  for (int four = 0; four < 4; ++four) {
    __m512i sums[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) sums[r] = _mm512_setzero_si512();
#pragma GCC unroll 16
    for (int piece = 0; piece < 4 * Chunks; ++piece) {
      const __m512i q = _mm512_loadu_si512(quad + 64 * piece);
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r)
        sums[r] = _mm512_dpbusd_epi32(
            sums[r],
            _mm512_broadcast_i32x4(
                _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[4 * four + r] + 16 * piece))),
            q);
    }
    parts[four] = sum_within_parts(sums[0], sums[1], sums[2], sums[3]);
  }
  store_quad(parts, out);
}

// One query, the lower halves of sixteen codes (`write_lower_row`).
template <int Chunks>
RELAY_INLINE void dot_lower_rows(const uint8_t* const* rows, const int8_t* query, int32_t* out) {
  const __m256i nibble = _mm256_set1_epi8(0x0f);
  __m512i q[Chunks], parts[4];
#pragma GCC unroll 4
  for (int c = 0; c < Chunks; ++c) q[c] = _mm512_loadu_si512(query + 64 * c);
#pragma GCC unroll 4
  for (int four = 0; four < 4; ++four) {
    __m512i sums[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      sums[r] = _mm512_setzero_si512();
#pragma GCC unroll 4
      for (int c = 0; c < Chunks; ++c) {
        const __m256i two =
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[4 * four + r] + 32 * c));
        const __m512i row =
            _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_and_si256(two, nibble)),
                               _mm256_and_si256(_mm256_srli_epi16(two, 4), nibble), 1);
        sums[r] = _mm512_dpbusd_epi32(sums[r], row, q[c]);
      }
    }
    parts[four] = sum_within_parts(sums[0], sums[1], sums[2], sums[3]);
  }
  store_sums(parts, out);
}

// Four queries whose 16-byte pieces alternate (`interleave_quad`), the lower halves of sixteen
// codes that lie one behind the other.
template <int Chunks>
RELAY_INLINE void dot_lower_rows_quad(const uint8_t* rows, const int8_t* quad,
                                      int32_t (*out)[kRowsAtOnce]) {
  const __m512i nibble = _mm512_set1_epi8(0x0f);
  __m512i parts[4];
#pragma GCC unroll 4
  for (int four = 0; four < 4; ++four) {
    __m512i sums[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) sums[r] = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int half = 0; half < 2 * Chunks; ++half) {
      const int piece = half / 2 * 4 + half % 2;
      const __m512i low = _mm512_loadu_si512(quad + 64 * piece);
      const __m512i high = _mm512_loadu_si512(quad + 64 * (piece + 2));
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) {
        const __m512i two = _mm512_broadcast_i32x4(_mm_loadu_si128(
            reinterpret_cast<const __m128i*>(rows + (4 * four + r) * 32 * Chunks + 16 * half)));
        sums[r] = _mm512_dpbusd_epi32(sums[r], _mm512_and_si512(two, nibble), low);
        sums[r] =
            _mm512_dpbusd_epi32(sums[r], _mm512_and_si512(_mm512_srli_epi16(two, 4), nibble), high);
      }
    }
    parts[four] = sum_within_parts(sums[0], sums[1], sums[2], sums[3]);
  }
  store_quad(parts, out);
}

// Appends the ids and scores of `mask` to two lists that have room for sixteen more.
RELAY_INLINE int append(uint32_t mask, const int32_t* ids, const int32_t* scores, int32_t* to_ids,
                        int32_t* to_scores) {
  const auto m = static_cast<__mmask16>(mask);
  _mm512_storeu_si512(to_ids, _mm512_maskz_compress_epi32(m, _mm512_loadu_si512(ids)));
  _mm512_storeu_si512(to_scores, _mm512_maskz_compress_epi32(m, _mm512_loadu_si512(scores)));
  return __builtin_popcount(mask);
}

// The rows of `scores` [16] above `bound`, as bits.
RELAY_INLINE uint32_t above(const int32_t* scores, int32_t bound) {
  return _mm512_cmpgt_epi32_mask(_mm512_loadu_si512(scores), _mm512_set1_epi32(bound));
}

RELAY_INLINE void prefetch_row(const uint8_t* row, int chunks) {
  for (int c = 0; c < chunks; ++c)
    _mm_prefetch(reinterpret_cast<const char*>(row + 64 * c), _MM_HINT_T0);
}

#else

#if !defined(__AVX2__)
template <int Chunks>
inline void dot_rows(const uint8_t* const* rows, const int8_t* query, int32_t* out) {
  for (int r = 0; r < kRowsAtOnce; ++r) {
    int32_t sum = 0;
    for (int i = 0; i < 64 * Chunks; ++i) sum += int32_t{rows[r][i]} * query[i];
    out[r] = sum;
  }
}

template <int Chunks>
inline void dot_rows_quad(const uint8_t* const* rows, const int8_t* quad,
                          int32_t (*out)[kRowsAtOnce]) {
  for (int q = 0; q < kQuad; ++q)
    for (int r = 0; r < kRowsAtOnce; ++r) {
      int32_t sum = 0;
      for (int piece = 0; piece < 4 * Chunks; ++piece)
        for (int i = 0; i < 16; ++i)
          sum += int32_t{rows[r][16 * piece + i]} * quad[64 * piece + 16 * q + i];
      out[q][r] = sum;
    }
}

template <int Chunks>
inline void dot_lower_rows(const uint8_t* const* rows, const int8_t* query, int32_t* out) {
  for (int r = 0; r < kRowsAtOnce; ++r) {
    int32_t sum = 0;
    for (int i = 0; i < 64 * Chunks; ++i) {
      const int two = rows[r][i / 64 * 32 + i % 32];
      sum += (i % 64 < 32 ? two & 0x0f : two >> 4) * query[i];
    }
    out[r] = sum;
  }
}

template <int Chunks>
inline void dot_lower_rows_quad(const uint8_t* rows, const int8_t* quad,
                                int32_t (*out)[kRowsAtOnce]) {
  for (int q = 0; q < kQuad; ++q)
    for (int r = 0; r < kRowsAtOnce; ++r) {
      int32_t sum = 0;
      for (int i = 0; i < 64 * Chunks; ++i) {
        const int two = rows[r * 32 * Chunks + i / 64 * 32 + i % 32];
        sum += (i % 64 < 32 ? two & 0x0f : two >> 4) * quad[i / 16 * 64 + 16 * q + i % 16];
      }
      out[q][r] = sum;
    }
}

#endif

inline int append(uint32_t mask, const int32_t* ids, const int32_t* scores, int32_t* to_ids,
                  int32_t* to_scores) {
  int count = 0;
  for (; mask; mask &= mask - 1) {
    to_ids[count] = ids[__builtin_ctz(mask)];
    to_scores[count++] = scores[__builtin_ctz(mask)];
  }
  return count;
}

inline uint32_t above(const int32_t* scores, int32_t bound) {
  uint32_t mask = 0;
  for (int r = 0; r < kRowsAtOnce; ++r) mask |= uint32_t{scores[r] > bound} << r;
  return mask;
}

inline void prefetch_row(const uint8_t* row, int chunks) {
  for (int c = 0; c < chunks; ++c) __builtin_prefetch(row + 64 * c);
}

#endif

// Into the second-level cache: for rows that are met later.
[[maybe_unused]] inline void prefetch_row_far(const uint8_t* row, int chunks) {
  for (int c = 0; c < chunks; ++c) __builtin_prefetch(row + 64 * c, 0, 2);
}

// Lays four query codes of `stride` bytes out for dot_rows_quad: 4 * stride bytes.
[[maybe_unused]] inline void interleave_quad(const int8_t* const* queries, int stride,
                                             int8_t* out) {
  for (int piece = 0; piece < stride / 16; ++piece)
    for (int q = 0; q < kQuad; ++q)
      std::memcpy(out + 64 * piece + 16 * q, queries[q] + 16 * piece, 16);
}

}  // namespace
}  // namespace relay::index

// SPDX-License-Identifier: Apache-2.0
// What code_lanes.h does with AVX-512 VNNI, in registers of 32 bytes.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace relay::index {
namespace {

RELAY_INLINE __m256i load_bytes(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}

// Adds the products of codes of four bits with a query's to `sums`, four neighbours to a lane: 15
// times 128, twice, fits into the 16 bits between.
RELAY_INLINE __m256i add_half_products(__m256i sums, __m256i codes, __m256i query,
                                       int16_t factor = 1) {
  const __m256i pairs = _mm256_maddubs_epi16(codes, query);
  return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(factor)));
}

RELAY_INLINE __m256i lower_halves(__m256i codes) {
  return _mm256_and_si256(codes, _mm256_set1_epi8(0x0f));
}
RELAY_INLINE __m256i upper_halves(__m256i codes) {
  return lower_halves(_mm256_srli_epi16(codes, 4));
}

// The same with codes of eight bits.
RELAY_INLINE __m256i add_products(__m256i sums, __m256i codes, __m256i query) {
  sums = add_half_products(sums, upper_halves(codes), query, 16);
  return add_half_products(sums, lower_halves(codes), query);
}

// The sums of either half of a register.
RELAY_INLINE void sum_halves(__m256i sums, int32_t* low, int32_t* high) {
  sums = _mm256_add_epi32(sums, _mm256_shuffle_epi32(sums, 0x4e));
  sums = _mm256_add_epi32(sums, _mm256_shuffle_epi32(sums, 0xb1));
  *low = _mm256_extract_epi32(sums, 0);
  *high = _mm256_extract_epi32(sums, 4);
}
RELAY_INLINE int32_t sum_of(__m256i sums) {
  int32_t low, high;
  sum_halves(sums, &low, &high);
  return low + high;
}

template <int Chunks>
RELAY_INLINE void dot_rows(const uint8_t* const* rows, const int8_t* query, int32_t* out) {
  for (int r = 0; r < kRowsAtOnce; ++r) {
    __m256i sums = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int at = 0; at < 64 * Chunks; at += 32)
      sums = add_products(sums, load_bytes(rows[r] + at), load_bytes(query + at));
    out[r] = sum_of(sums);
  }
}

template <int Chunks>
RELAY_INLINE void dot_lower_rows(const uint8_t* const* rows, const int8_t* query, int32_t* out) {
  for (int r = 0; r < kRowsAtOnce; ++r) {
    __m256i sums = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int c = 0; c < Chunks; ++c) {
      const __m256i two = load_bytes(rows[r] + 32 * c);
      sums = add_half_products(sums, lower_halves(two), load_bytes(query + 64 * c));
      sums = add_half_products(sums, upper_halves(two), load_bytes(query + 64 * c + 32));
    }
    out[r] = sum_of(sums);
  }
}

// `add(sums, r, two)` adds the products of a row with two of four queries, those at 32 * two of
// each piece.
template <class Add>
RELAY_INLINE void dot_each_quad(int32_t (*out)[kRowsAtOnce], Add&& add) {
  for (int r = 0; r < kRowsAtOnce; ++r)
#pragma GCC unroll 2
    for (int two = 0; two < 2; ++two)
      sum_halves(add(_mm256_setzero_si256(), r, two), &out[2 * two][r], &out[2 * two + 1][r]);
}
RELAY_INLINE __m256i load_twice(const uint8_t* from) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

template <int Chunks>
RELAY_INLINE void dot_rows_quad(const uint8_t* const* rows, const int8_t* quad,
                                int32_t (*out)[kRowsAtOnce]) {
  dot_each_quad(out, [&](__m256i sums, int r, int two) {
#pragma GCC unroll 16
    for (int piece = 0; piece < 4 * Chunks; ++piece)
      sums = add_products(sums, load_twice(rows[r] + 16 * piece),
                          load_bytes(quad + 64 * piece + 32 * two));
    return sums;
  });
}

template <int Chunks>
RELAY_INLINE void dot_lower_rows_quad(const uint8_t* rows, const int8_t* quad,
                                      int32_t (*out)[kRowsAtOnce]) {
  dot_each_quad(out, [&](__m256i sums, int r, int two) {
#pragma GCC unroll 8
    for (int half = 0; half < 2 * Chunks; ++half) {
      const int8_t* const queries = quad + 64 * (half / 2 * 4 + half % 2) + 32 * two;
      const __m256i codes = load_twice(rows + r * 32 * Chunks + 16 * half);
      sums = add_half_products(sums, lower_halves(codes), load_bytes(queries));
      sums = add_half_products(sums, upper_halves(codes), load_bytes(queries + 128));
    }
    return sums;
  });
}

}  // namespace
}  // namespace relay::index

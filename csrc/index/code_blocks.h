// SPDX-License-Identifier: Apache-2.0
// Products of queries with blocks of key codes.
#pragma once

#include "block_layout.h"
#include "code_lanes.h"

namespace relay::index {
namespace {

struct CodeBlocks {
  const uint8_t* data;
  int32_t stride;  // of a key's code, in bytes

  const uint8_t* block(int64_t b) const { return data + b * stride * kBlockKeys; }
};

// out[query][block][lane]: products of `Queries` query codes, `query_stride` apart, with `Blocks`
// neighbouring blocks.
#if defined(__AVX512VNNI__)

template <int Queries, int Blocks>
RELAY_INLINE void multiply_blocks(const uint8_t* blocks, int32_t stride, const int8_t* queries,
                                  int64_t query_stride, int32_t* out) {
  __m512i sums[Queries][Blocks];
#pragma GCC unroll 4
  for (int q = 0; q < Queries; ++q)
#pragma GCC unroll 8
    for (int b = 0; b < Blocks; ++b) sums[q][b] = _mm512_setzero_si512();
  const int64_t block_bytes = int64_t{stride} * kBlockKeys;
  for (int s = 0; s < stride / 4; ++s) {
    __m512i keys[Blocks];
#pragma GCC unroll 8
    for (int b = 0; b < Blocks; ++b)
      keys[b] = _mm512_loadu_si512(blocks + b * block_bytes + 64 * s);
#pragma GCC unroll 4
    for (int q = 0; q < Queries; ++q) {
      int32_t four;
      std::memcpy(&four, queries + q * query_stride + 4 * s, 4);
      const __m512i query = _mm512_set1_epi32(four);
#pragma GCC unroll 8
      for (int b = 0; b < Blocks; ++b) sums[q][b] = _mm512_dpbusd_epi32(sums[q][b], keys[b], query);
    }
  }
#pragma GCC unroll 4
  for (int q = 0; q < Queries; ++q)
#pragma GCC unroll 8
    for (int b = 0; b < Blocks; ++b)
      _mm512_storeu_si512(out + (q * Blocks + b) * kBlockKeys, sums[q][b]);
}

#else

template <int Queries, int Blocks>
inline void multiply_blocks(const uint8_t* blocks, int32_t stride, const int8_t* queries,
                            int64_t query_stride, int32_t* out) {
  const int64_t block_bytes = int64_t{stride} * kBlockKeys;
  for (int q = 0; q < Queries; ++q)
    for (int b = 0; b < Blocks; ++b)
      for (int lane = 0; lane < kBlockKeys; ++lane) {
        int32_t sum = 0;
        for (int32_t i = 0; i < stride; ++i)
          sum += int32_t{blocks[b * block_bytes + 64 * (i / 4) + 4 * lane + i % 4]} *
                 queries[q * query_stride + i];
        out[(q * Blocks + b) * kBlockKeys + lane] = sum;
      }
}

#endif

// Calls `take(query, block, count, scores)` with the sixteen scores of each of `count` neighbouring
// blocks, a constant, until each query has met `num_blocks` of them.
template <class Take>
RELAY_INLINE void for_each_product(const CodeBlocks& codes, int64_t first, int64_t num_blocks,
                                   const int8_t* queries, int64_t query_stride, int num_queries,
                                   Take&& take) {
  alignas(64) int32_t scores[4 * 4 * kBlockKeys];
  const auto run = [&](auto num, auto at_once, int64_t b, int q) {
    constexpr int kQueries = num(), kBlocks = at_once();
    multiply_blocks<kQueries, kBlocks>(codes.block(first + b), codes.stride,
                                       queries + q * query_stride, query_stride, scores);
    for (int i = 0; i < kQueries; ++i)
      take(q + i, first + b, at_once, scores + i * kBlocks * kBlockKeys);
  };
  const auto some_blocks = [&](auto at_once, int64_t b) {
    int q = 0;
    for (; q + 4 <= num_queries; q += 4) run(std::integral_constant<int, 4>(), at_once, b, q);
    if (q + 2 <= num_queries) {
      run(std::integral_constant<int, 2>(), at_once, b, q);
      q += 2;
    }
    if (q < num_queries) run(std::integral_constant<int, 1>(), at_once, b, q);
  };
  int64_t b = 0;
  for (; b + 4 <= num_blocks; b += 4) some_blocks(std::integral_constant<int, 4>(), b);
  for (; b < num_blocks; ++b) some_blocks(std::integral_constant<int, 1>(), b);
}

}  // namespace
}  // namespace relay::index

// SPDX-License-Identifier: Apache-2.0
// Products of queries with blocks of key codes.
#pragma once

#include "block_layout.h"
#include "code_lanes.h"

namespace relay::index {
namespace {

// Blocks of whole codes (`write_lane`), or of their upper halves (`write_upper_lane`).
template <bool UpperHalves>
struct Blocks {
  const uint8_t* data;
  int32_t stride;  // of a key's whole code, in bytes

  int64_t block_bytes() const { return int64_t{stride} * kBlockKeys / (UpperHalves ? 2 : 1); }
  const uint8_t* block(int64_t b) const { return data + b * block_bytes(); }
};
using CodeBlocks = Blocks<false>;
using UpperBlocks = Blocks<true>;

// What is asked from memory so far ahead: the processor's own prefetching stops at each page.
constexpr int kPrefetchedBlocks = 8;

// out[query][block][lane]: products of `Queries` query codes, `query_stride` apart, with
// `NumBlocks` neighbouring blocks from `first` on.
#if defined(__AVX512VNNI__)

template <int Queries, int NumBlocks, bool UpperHalves>
RELAY_INLINE void multiply_blocks(const Blocks<UpperHalves>& blocks, int64_t first,
                                  const int8_t* queries, int64_t query_stride, int32_t* out) {
  constexpr int kStep = UpperHalves ? 8 : 4;  // elements of a key in 64 bytes of a block
  __m512i sums[Queries][NumBlocks];
#pragma GCC unroll 4
  for (int q = 0; q < Queries; ++q)
#pragma GCC unroll 8
    for (int b = 0; b < NumBlocks; ++b) sums[q][b] = _mm512_setzero_si512();
  const uint8_t* const data = blocks.block(first);
  const int64_t block_bytes = blocks.block_bytes();
  const auto four_of = [&](int q, int element) {
    int32_t four;
    std::memcpy(&four, queries + q * query_stride + element, 4);
    return _mm512_set1_epi32(four);
  };
  [[maybe_unused]] const __m512i nibble = _mm512_set1_epi8(0x0f);
  for (int s = 0; s < blocks.stride / kStep; ++s) {
    __m512i keys[NumBlocks];
#pragma GCC unroll 8
    for (int b = 0; b < NumBlocks; ++b) {
      const uint8_t* const line = data + b * block_bytes + 64 * s;
      keys[b] = _mm512_loadu_si512(line);
      _mm_prefetch(reinterpret_cast<const char*>(line + kPrefetchedBlocks * block_bytes),
                   _MM_HINT_T0);
    }
    const auto add = [&](int element) {
#pragma GCC unroll 4
      for (int q = 0; q < Queries; ++q) {
        const __m512i query = four_of(q, element);
#pragma GCC unroll 8
        for (int b = 0; b < NumBlocks; ++b)
          sums[q][b] = _mm512_dpbusd_epi32(
              sums[q][b], UpperHalves ? _mm512_and_si512(keys[b], nibble) : keys[b], query);
      }
    };
    add(kStep * s);
    if constexpr (UpperHalves) {
#pragma GCC unroll 8
      for (int b = 0; b < NumBlocks; ++b) keys[b] = _mm512_srli_epi16(keys[b], 4);
      add(kStep * s + 4);
    }
  }
#pragma GCC unroll 4
  for (int q = 0; q < Queries; ++q)
#pragma GCC unroll 8
    for (int b = 0; b < NumBlocks; ++b)
      _mm512_storeu_si512(out + (q * NumBlocks + b) * kBlockKeys, sums[q][b]);
}

#elif defined(__AVX2__)

template <int Queries, int NumBlocks, bool UpperHalves>
RELAY_INLINE void multiply_blocks(const Blocks<UpperHalves>& blocks, int64_t first,
                                  const int8_t* queries, int64_t query_stride, int32_t* out) {
  constexpr int kStep = UpperHalves ? 8 : 4;
  const int64_t block_bytes = blocks.block_bytes();
  const auto four_of = [&](int q, int element) {
    int32_t four;
    std::memcpy(&four, queries + q * query_stride + element, 4);
    return _mm256_set1_epi32(four);
  };
  for (int b = 0; b < NumBlocks; ++b) {
    __m256i sums[Queries][2];
#pragma GCC unroll 4
    for (int q = 0; q < Queries; ++q) sums[q][0] = sums[q][1] = _mm256_setzero_si256();
    const uint8_t* const data = blocks.block(first + b);
    for (int s = 0; s < blocks.stride / kStep; ++s) {
      const uint8_t* const line = data + 64 * s;
      __builtin_prefetch(line + kPrefetchedBlocks * block_bytes);
      const __m256i keys[2] = {load_bytes(line), load_bytes(line + 32)};
#pragma GCC unroll 4
      for (int q = 0; q < Queries; ++q) {
        const __m256i query = four_of(q, kStep * s);
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
          if constexpr (UpperHalves) {
            sums[q][half] = add_half_products(sums[q][half], lower_halves(keys[half]), query);
            sums[q][half] = add_half_products(sums[q][half], upper_halves(keys[half]),
                                              four_of(q, kStep * s + 4));
          } else {
            sums[q][half] = add_products(sums[q][half], keys[half], query);
          }
        }
      }
    }
#pragma GCC unroll 4
    for (int q = 0; q < Queries; ++q)
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half)
        _mm256_storeu_si256(
            reinterpret_cast<__m256i*>(out + (q * NumBlocks + b) * kBlockKeys + 8 * half),
            sums[q][half]);
  }
}

#else

template <int Queries, int NumBlocks, bool UpperHalves>
inline void multiply_blocks(const Blocks<UpperHalves>& blocks, int64_t first, const int8_t* queries,
                            int64_t query_stride, int32_t* out) {
  constexpr int kStep = UpperHalves ? 8 : 4;
  for (int q = 0; q < Queries; ++q)
    for (int b = 0; b < NumBlocks; ++b)
      for (int lane = 0; lane < kBlockKeys; ++lane) {
        const uint8_t* const data = blocks.block(first + b);
        int32_t sum = 0;
        for (int32_t i = 0; i < blocks.stride; ++i) {
          const int code = data[64 * (i / kStep) + 4 * lane + i % 4];
          const int element = !UpperHalves ? code : (i % kStep < 4 ? code & 0x0f : code >> 4);
          sum += element * queries[q * query_stride + i];
        }
        out[(q * NumBlocks + b) * kBlockKeys + lane] = sum;
      }
}

#endif

// Calls `take(query, queries, block, blocks, scores)` with the products of each of so many queries
// and neighbouring blocks, both constants: scores [queries][blocks][lane]. Until each query has met
// `num_blocks` of them.
template <bool UpperHalves, class Take>
RELAY_INLINE void for_each_product(const Blocks<UpperHalves>& codes, int64_t first,
                                   int64_t num_blocks, const int8_t* queries, int64_t query_stride,
                                   int num_queries, Take&& take) {
  alignas(64) int32_t scores[4 * 4 * kBlockKeys];
  const auto run = [&](auto num, auto at_once, int64_t b, int q) {
    multiply_blocks<num(), at_once()>(codes, first + b, queries + q * query_stride, query_stride,
                                      scores);
    take(q, num, first + b, at_once, scores);
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

// The same with `take(query, block, blocks, scores)`, one query after the other.
template <bool UpperHalves, class Take>
RELAY_INLINE void for_each_query_product(const Blocks<UpperHalves>& codes, int64_t first,
                                         int64_t num_blocks, const int8_t* queries,
                                         int64_t query_stride, int num_queries, Take&& take) {
  for_each_product(codes, first, num_blocks, queries, query_stride, num_queries,
                   [&](int q, auto num, int64_t block, auto count, const int32_t* scores) {
                     for (int i = 0; i < num(); ++i)
                       take(q + i, block, count, scores + i * count() * kBlockKeys);
                   });
}

}  // namespace
}  // namespace relay::index

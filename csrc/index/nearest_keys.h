// SPDX-License-Identifier: Apache-2.0
// The keys with the largest inner products for many queries: products of 8-bit codes, block by
// block, of which only those above a threshold are looked at, then exact products of what is left.
#pragma once

#include <omp.h>

#include "aligned_vector.h"
#include "candidate_list.h"
#include "code_blocks.h"
#include "query_code.h"
#include "rescore.h"
#include "spread_order.h"

namespace relay::index {
namespace {

constexpr int kSampleKeys = 4096;

// The more, the more rarely all keys are streamed through the caches; but every thread wants its
// share of the work.
inline int64_t queries_at_once(int64_t num_queries, int num_threads) {
  constexpr int64_t kFewest = 32, kMost = 512, kShares = 4;
  return std::clamp(num_queries / (kShares * num_threads), kFewest, kMost);
}

// The best `k` of a query's candidates by exact score, -1 past their number. Clobbers `chosen`.
inline void refine(const Rows& keys, const float* query, std::span<const int32_t> always,
                   std::vector<int32_t>& chosen, std::vector<Found>& exact, int32_t k,
                   int32_t* out) {
  if (!always.empty()) {
    chosen.insert(chosen.end(), always.begin(), always.end());
    std::sort(chosen.begin(), chosen.end());
    chosen.erase(std::unique(chosen.begin(), chosen.end()), chosen.end());
  }
  exact.clear();
  score_exactly(query, keys, chosen, exact);
  std::sort(exact.begin(), exact.end(), better);
  for (int32_t i = 0; i < k; ++i)
    out[i] = i < static_cast<int32_t>(exact.size()) ? exact[i].id : -1;
}

// ids [num_queries, k], best first, -1 past the number of keys. Keys in `always` are scored
// whatever their codes say.
inline void nearest_keys(const Codes& codes, const Rows& keys, const float* queries,
                         int64_t num_queries, int32_t k, std::span<const int32_t> always,
                         int32_t* ids, int num_threads) {
  const int64_t n = codes.num_rows, num_blocks = (n + kBlockKeys - 1) / kBlockKeys;
  const int64_t at_once = queries_at_once(num_queries, num_threads);
  const SpreadOrder order(n);
  AlignedVector<uint8_t> laid_out(static_cast<size_t>(num_blocks) * kBlockKeys * codes.stride);
#pragma omp parallel for num_threads(num_threads) schedule(static)
  for (int64_t b = 0; b < num_blocks; ++b)
    for (int lane = 0; lane < kBlockKeys; ++lane) {
      const int64_t position = b * kBlockKeys + lane;
      write_lane(codes.data + (position < n ? order[position] : 0) * codes.stride, codes.stride,
                 laid_out.data() + b * kBlockKeys * codes.stride, lane);
    }
  const CodeBlocks blocks{laid_out.data(), codes.stride};
  const auto keep = static_cast<int32_t>(std::min<int64_t>(n, num_rescored(k)));
  // the r-th best of a sample is a bound that lets a little more than `keep` keys through
  const int64_t sample_blocks =
      num_blocks / 8 < kSampleKeys / kBlockKeys ? 0 : kSampleKeys / kBlockKeys;
  const double expected = static_cast<double>(sample_blocks) * kBlockKeys * keep / n;
  const auto sample_rank = static_cast<int32_t>(expected + 3 * std::sqrt(expected) + 2);
#pragma omp parallel num_threads(num_threads)
  {
    std::vector<CandidateList> lists(at_once);
    AlignedVector<int8_t> query_codes(static_cast<size_t>(at_once) * codes.stride);
    std::vector<int32_t> chosen;
    std::vector<Found> exact;
    const auto scan = [&](int64_t count_blocks, int first, int count) {
      // several blocks stay in the first-level cache while all queries meet them
      constexpr int64_t kStep = 4;
      for (int64_t b = 0; b < count_blocks; b += kStep)
        for_each_query_product(blocks, b, std::min(kStep, count_blocks - b),
                               query_codes.data() + static_cast<int64_t>(first) * codes.stride,
                               codes.stride, count,
                               [&](int q, int64_t block, auto at_once, const int32_t* scores) {
                                 offer<at_once()>(lists[first + q], scores, block * kBlockKeys,
                                                  first_lanes(n - block * kBlockKeys));
                               });
    };
#pragma omp for schedule(dynamic, 1)
    for (int64_t begin = 0; begin < num_queries; begin += at_once) {
      const int count = static_cast<int>(std::min(at_once, num_queries - begin));
      std::vector<int32_t> bounds(count, INT_MIN);
      for (int q = 0; q < count; ++q)
        encode_query(queries + (begin + q) * codes.size, codes,
                     query_codes.data() + static_cast<int64_t>(q) * codes.stride);
      if (sample_blocks) {
        for (int q = 0; q < count; ++q) lists[q].reset_best(sample_rank, 0);
        scan(sample_blocks, 0, count);
        for (int q = 0; q < count; ++q) {
          lists[q].shrink();
          bounds[q] = std::max(lists[q].bound(), INT_MIN + 1) - 1;
        }
      }
      for (int q = 0; q < count; ++q) lists[q].reset_best(keep, 0, bounds[q]);
      scan(num_blocks, 0, count);
      for (int q = 0; q < count; ++q) {
        if (lists[q].count() < keep) {  // the sample promised too much
          lists[q].reset_best(keep, 0);
          scan(num_blocks, q, 1);
        }
        lists[q].shrink(true);
        chosen.clear();
        for (const Candidate& c : std::span(lists[q].begin(), lists[q].end()))
          chosen.push_back(static_cast<int32_t>(order[c.position]));
        refine(keys, queries + (begin + q) * codes.size, always, chosen, exact, k,
               ids + (begin + q) * k);
      }
    }
  }
}

// The same from candidates [num_queries, num_candidates] that were found elsewhere.
inline void refine_candidates(const Rows& keys, const float* queries, int64_t num_queries,
                              const int32_t* candidates, int64_t num_candidates,
                              std::span<const int32_t> always, int32_t k, int32_t* ids,
                              int num_threads) {
#pragma omp parallel num_threads(num_threads)
  {
    std::vector<int32_t> chosen;
    std::vector<Found> exact;
#pragma omp for schedule(dynamic, 64)
    for (int64_t q = 0; q < num_queries; ++q) {
      chosen.assign(candidates + q * num_candidates, candidates + (q + 1) * num_candidates);
      refine(keys, queries + q * keys.size, always, chosen, exact, k, ids + q * k);
    }
  }
}

}  // namespace
}  // namespace relay::index

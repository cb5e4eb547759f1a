// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "scan.h"

namespace relay::index {
namespace {

// Scans the `width` lists whose centres each query likes best, or as many as hold the keys it asks
// for; the queries of a group share them.
inline void search_inverted(const Codes& codes, const InvertedLists& lists, const Rows& keys,
                            const SearchRequest& request, ScanScratch& scratch,
                            SearchOutcome& outcome) {
  static thread_local std::vector<int32_t> scores, order, sizes;
  static thread_local std::vector<char> probed;
  static thread_local std::vector<BlockRange> ranges;
  scratch.encode(request.queries, request.num_queries, codes);
  const int32_t n = lists.num_lists, padded = (n + kBlockKeys - 1) / kBlockKeys * kBlockKeys;
  scores.resize(static_cast<size_t>(request.num_queries) * padded);
  for_each_product({lists.centres, codes.stride}, 0, padded / kBlockKeys,
                   scratch.query_codes.data(), codes.stride, request.num_queries,
                   [&](int q, int64_t block, auto count, const int32_t* products) {
                     std::memcpy(
                         scores.data() + static_cast<size_t>(q) * padded + block * kBlockKeys,
                         products, sizeof(int32_t) * kBlockKeys * count());
                   });
  // of a list, the keys that count: [first, end)
  const auto counting = [&](int32_t i) -> std::pair<int64_t, int64_t> {
    const int32_t* ids = lists.ids + lists.starts[i] * kBlockKeys;
    int64_t first = 0, end = lists.counts[i];
    if (request.prefix_len < codes.num_rows)
      end = std::lower_bound(ids, ids + end, request.prefix_len) - ids;
    if (request.begin) first = std::lower_bound(ids, ids + end, request.begin) - ids;
    return {first, end};
  };
  order.clear();
  sizes.assign(n, 0);
  for (int32_t i = 0; i < n; ++i) {
    const auto [first, end] = counting(i);
    sizes[i] = static_cast<int32_t>(end - first);
    if (sizes[i]) order.push_back(i);
  }
  probed.assign(n, 0);
  for (int q = 0; q < request.num_queries; ++q) {
    const int32_t* mine = scores.data() + static_cast<size_t>(q) * padded;
    const auto better_list = [&](int32_t a, int32_t b) {
      return mine[a] > mine[b] || (mine[a] == mine[b] && a < b);
    };
    const auto read = order.begin() + std::min<int64_t>(request.width, order.size());
    std::nth_element(order.begin(), read, order.end(), better_list);
    int64_t found = 0;
    const auto probe = [&](int32_t i) {
      probed[i] = 1;
      found += sizes[i];
    };
    std::for_each(order.begin(), read, probe);
    if (found >= request.k) continue;
    std::sort(read, order.end(), better_list);
    for (auto next = read; next < order.end() && found < request.k; ++next) probe(*next);
  }
  ranges.clear();
  for (int32_t i = 0; i < n; ++i) {
    if (!probed[i]) continue;
    const auto [first, end] = counting(i);
    const int64_t skipped_blocks = first / kBlockKeys;
    ranges.push_back({lists.starts[i] + skipped_blocks, end - skipped_blocks * kBlockKeys,
                      (1u << (first % kBlockKeys)) - 1});
  }
  outcome.distances += n;
  scan_ranges(codes, {lists.blocks, codes.stride}, keys, lists.ids, ranges, false, request, scratch,
              outcome);
}

}  // namespace
}  // namespace relay::index

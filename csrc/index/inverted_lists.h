// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "scan.h"

namespace relay::index {
namespace {

// Scans the `width` lists whose centres each query likes best; the queries of a group share them.
inline void search_inverted(const Codes& codes, const InvertedLists& lists, const Rows& keys,
                            const SearchRequest& request, ScanScratch& scratch,
                            SearchOutcome& outcome) {
  static thread_local std::vector<int32_t> scores, order;
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
  // only lists with keys that count
  const bool all_count = request.begin == 0 && request.prefix_len >= codes.num_rows;
  order.clear();
  for (int32_t i = 0; i < n; ++i) {
    const int32_t *ids = lists.ids + lists.starts[i] * kBlockKeys, *end = ids + lists.counts[i];
    const int32_t* first = request.begin ? std::lower_bound(ids, end, request.begin) : ids;
    if (all_count || (first < end && *first < request.prefix_len)) order.push_back(i);
  }
  probed.assign(n, 0);
  const int32_t width = std::min(request.width, static_cast<int32_t>(order.size()));
  for (int q = 0; q < request.num_queries; ++q) {
    const int32_t* mine = scores.data() + static_cast<size_t>(q) * padded;
    std::nth_element(order.begin(), order.begin() + width, order.end(), [&](int32_t a, int32_t b) {
      return mine[a] > mine[b] || (mine[a] == mine[b] && a < b);
    });
    for (int32_t i = 0; i < width; ++i) probed[order[i]] = 1;
  }
  ranges.clear();
  for (int32_t i = 0; i < n; ++i) {
    if (!probed[i]) continue;
    const int32_t* ids = lists.ids + lists.starts[i] * kBlockKeys;
    int64_t first = 0, count = lists.counts[i];
    if (request.prefix_len < codes.num_rows)
      count = std::lower_bound(ids, ids + count, request.prefix_len) - ids;
    if (request.begin) first = std::lower_bound(ids, ids + count, request.begin) - ids;
    if (first == count) continue;
    const int64_t skipped_blocks = first / kBlockKeys;
    ranges.push_back({lists.starts[i] + skipped_blocks, count - skipped_blocks * kBlockKeys,
                      (1u << (first % kBlockKeys)) - 1});
  }
  outcome.distances += n;
  scan_ranges(codes, {lists.blocks, codes.stride}, keys, lists.ids, ranges, false, request, scratch,
              outcome);
}

}  // namespace
}  // namespace relay::index

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "list_choice.h"
#include "scan.h"

namespace relay::index {
namespace {

// Scans the `width` lists whose centres each query likes best, or as many as hold the keys it asks
// for; the queries of a group share them.
inline void search_inverted(const Codes& codes, const InvertedLists& lists, const Rows& keys,
                            const SearchRequest& request, ScanScratch& scratch,
                            SearchOutcome& outcome) {
  static thread_local ListChoice choice;
  static thread_local std::vector<int32_t> candidates, sizes;
  static thread_local std::vector<BlockRange> ranges;
  scratch.encode(request.queries, request.num_queries, codes);
  const int32_t n = lists.num_lists;
  choice.reset(n, request.num_queries);
  choice.add_products({lists.centres, codes.stride}, 0, n, scratch.query_codes.data());
  // of a list, the keys that count: [first, end)
  const auto counting = [&](int32_t i) -> std::pair<int64_t, int64_t> {
    const int32_t* ids = lists.ids + lists.starts[i] * kBlockKeys;
    int64_t first = 0, end = lists.counts[i];
    if (request.prefix_len < codes.num_rows)
      end = std::lower_bound(ids, ids + end, request.prefix_len) - ids;
    if (request.begin) first = std::lower_bound(ids, ids + end, request.begin) - ids;
    return {first, end};
  };
  candidates.clear();
  sizes.assign(n, 0);
  for (int32_t i = 0; i < n; ++i) {
    const auto [first, end] = counting(i);
    sizes[i] = static_cast<int32_t>(end - first);
    if (sizes[i]) candidates.push_back(i);
  }
  for (int q = 0; q < request.num_queries; ++q)
    choice.choose(q, candidates, sizes, request.width, request.k);
  ranges.clear();
  for (int32_t i = 0; i < n; ++i) {
    if (!choice.is_chosen(i)) continue;
    const auto [first, end] = counting(i);
    const int64_t skipped_blocks = first / kBlockKeys;
    ranges.push_back({lists.starts[i] + skipped_blocks, end - skipped_blocks * kBlockKeys,
                      (1u << (first % kBlockKeys)) - 1});
  }
  outcome.distances += n;
  outcome.code_bytes += int64_t{n} * codes.stride;
  BlockScan scan(codes, {lists.blocks, codes.stride}, keys, lists.ids, false, request, scratch,
                 outcome);
  scan.read(ranges);
  scan.finish();
}

}  // namespace
}  // namespace relay::index

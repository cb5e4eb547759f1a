// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "block_ranges.h"
#include "list_choice.h"
#include "scan.h"

namespace relay::index {
namespace {

constexpr int64_t kFirstRead = 16;  // token blocks of each query, before exact scores bound others

// Scores token blocks [begin, end): by their mean, or by the largest product that any code between
// their bounds has.
inline void score_token_blocks(const Codes& codes, const TokenBlocks& blocks, int32_t begin,
                               int32_t end, const AlignedVector<int8_t>& queries,
                               ListChoice& choice) {
  if (!blocks.smallest) {
    choice.add_products({blocks.representatives, codes.stride}, begin, end, queries.data());
    return;
  }
  static thread_local AlignedVector<int8_t> part;
  part.resize(queries.size());
  std::transform(queries.begin(), queries.end(), part.begin(),
                 [](int8_t code) { return std::max<int8_t>(code, 0); });
  choice.add_products({blocks.representatives, codes.stride}, begin, end, part.data());
  std::transform(queries.begin(), queries.end(), part.begin(),
                 [](int8_t code) { return std::min<int8_t>(code, 0); });
  choice.add_products({blocks.smallest, codes.stride}, begin, end, part.data());
}

// Scans the `width` token blocks that each query likes best, or as many as hold the keys it asks
// for; the queries of a group share them. With a `width` of 0, which takes bounds: all that may
// hold an answer, best bound first.
inline void search_token_blocks(const Codes& codes, const TokenBlocks& blocks, const Rows& keys,
                                const SearchRequest& request, ScanScratch& scratch,
                                SearchOutcome& outcome) {
  static thread_local ListChoice choice;
  static thread_local std::vector<int32_t> sizes, unread, candidates;
  static thread_local std::vector<BlockRange> ranges;
  const bool exact = request.width == 0;
  const std::span<const int32_t> always(request.always, request.num_always);
  const int64_t tokens = blocks.block_tokens;
  const auto n = static_cast<int32_t>((codes.num_rows + tokens - 1) / tokens);
  const auto first = static_cast<int32_t>(request.begin / tokens);
  const auto end = static_cast<int32_t>((request.prefix_len + tokens - 1) / tokens);
  scratch.encode(request.queries, request.num_queries, codes);
  choice.reset(n, request.num_queries);
  score_token_blocks(codes, blocks, first, end, scratch.query_codes, choice);
  // of a token block, the keys that count: [first, end)
  const auto counting = [&](int32_t i) -> std::pair<int64_t, int64_t> {
    return {std::max(request.begin, i * tokens), std::min(request.prefix_len, (i + 1) * tokens)};
  };
  sizes.assign(n, 0);  // those with a code
  for (int32_t i = first; i < end; ++i)
    sizes[i] = static_cast<int32_t>(counting(i).second - counting(i).first);
  for (const int32_t id : always)
    if (counts(request, id)) --sizes[id / tokens];
  unread.clear();
  for (int32_t i = first; i < end; ++i)
    if (sizes[i] > 0) unread.push_back(i);
  int64_t num_read = 0;
  BlockScan scan(codes, {blocks.codes, codes.stride}, keys, nullptr, exact, request, scratch,
                 outcome);
  for (int64_t width = exact ? kFirstRead : request.width;; width *= 2) {
    for (int q = 0; q < request.num_queries; ++q) {
      // no key of a token block scores more than its bound
      const int32_t bound = blocks.smallest ? scratch.lists[q].bound() : INT_MIN;
      candidates.clear();
      std::copy_if(unread.begin(), unread.end(), std::back_inserter(candidates),
                   [&](int32_t i) { return choice.score(q, i) > bound; });
      choice.choose(q, candidates, sizes, width, exact ? 0 : request.k);
    }
    ranges.clear();
    std::pair<int64_t, int64_t> run{0, 0};
    for (const int32_t i : unread) {
      if (!choice.is_chosen(i)) continue;
      const auto [from, to] = counting(i);
      if (from != run.second) {
        append_ranges(run.first, run.second, always, ranges);
        run.first = from;
      }
      run.second = to;
      ++num_read;
    }
    append_ranges(run.first, run.second, always, ranges);
    scan.read(ranges);
    if (!exact || ranges.empty()) break;
    std::erase_if(unread, [&](int32_t i) { return choice.is_chosen(i); });
    for (int q = 0; q < request.num_queries; ++q) scratch.lists[q].shrink();
  }
  scan.finish();
  outcome.hops = num_read;
  const int64_t representatives = int64_t{end - first} * (blocks.smallest ? 2 : 1);
  outcome.distances += representatives;
  outcome.code_bytes += representatives * codes.stride;
}

}  // namespace
}  // namespace relay::index

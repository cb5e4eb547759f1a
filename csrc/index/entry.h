// SPDX-License-Identifier: Apache-2.0
// Included once per instruction set: makes an IndexKernels table of the templates.
#pragma once

#include "attend.h"
#include "encode_keys.h"
#include "graph_build.h"
#include "inverted_lists.h"
#include "kernels.h"
#include "nearest_keys.h"
#include "split_scan.h"
#include "token_blocks.h"

namespace relay::index {
namespace {

// Calls `body` with the length of a code row as a constant.
template <class Body>
void with_chunks(const Codes& codes, Body&& body) {
  switch (codes.stride / 64) {
    case 1:
      return body(std::integral_constant<int, 1>());
    case 2:
      return body(std::integral_constant<int, 2>());
    case 3:
      return body(std::integral_constant<int, 3>());
    default:
      return body(std::integral_constant<int, 4>());
  }
}

std::pair<float, float> encode(const Rows& keys, const float* mean, const float* scale,
                               int64_t begin, int64_t end, uint8_t* codes, int64_t stride,
                               uint8_t* outside, int num_threads) {
  const CodeNorms norms =
      encode_keys(keys, mean, scale, begin, end, codes, stride, outside, num_threads);
  return {norms.longest, norms.longest_error};
}

void nearest(const Codes& codes, const Rows& keys, const float* queries, int64_t num_queries,
             int32_t k, std::span<const int32_t> always, int32_t* ids, int num_threads) {
  nearest_keys(codes, keys, queries, num_queries, k, always, ids, num_threads);
}

void encode_query_only(const Codes& codes, const float* query, int8_t* code) {
  encode_query(query, codes, code);
}

void build_graph(const Codes& codes, const Rows& keys, const Graph& graph,
                 const GraphBuildOptions& options, const int32_t* nearest, int64_t num_queries,
                 int32_t k, const int32_t* entries, int32_t num_entries) {
  with_chunks(codes, [&](auto chunks) {
    GraphBuilder<chunks()> builder(codes, keys, graph, options);
    builder.project(nearest, num_queries, k);
    if (options.supply_degree) builder.connect(entries, num_entries);
    builder.repair(entries, num_entries);
  });
}

void scan(const Codes& codes, const SplitCodes& split, const Rows& keys,
          std::span<const BlockRange> ranges, const SearchRequest& request,
          SearchOutcome& outcome) {
  static thread_local ScanScratch scratch;
  scratch.encode(request.queries, request.num_queries, codes);
  with_chunks(codes, [&](auto chunks) {
    SplitScan<chunks()>(codes, split, keys, request, scratch, outcome).run(ranges);
  });
}

void search_lists(const Codes& codes, const InvertedLists& lists, const Rows& keys,
                  const SearchRequest& request, SearchOutcome& outcome) {
  static thread_local ScanScratch scratch;
  search_inverted(codes, lists, keys, request, scratch, outcome);
}

void search_blocks(const Codes& codes, const TokenBlocks& blocks, const Rows& keys,
                   const SearchRequest& request, SearchOutcome& outcome) {
  static thread_local ScanScratch scratch;
  search_token_blocks(codes, blocks, keys, request, scratch, outcome);
}

// The exact scores of what the codes promise, and the best of them.
template <class Search>
void rescore(const Search& search, int i, const Rows& keys, const SearchRequest& request,
             std::vector<int32_t>& ids, SearchOutcome& outcome, std::vector<Found>& found) {
  const ScoreQueue& queue = search.queue(i);
  const auto entries = queue.entries();
  int64_t least = std::max<int64_t>(queue.bound(), queue.below_range());
  if (request.k)
    least = std::max<int64_t>(least,
                              queue.bound_of_best(static_cast<int32_t>(num_rescored(request.k))));
  ids.resize(entries.size());
  size_t count = 0;
  for (const auto& entry : entries) {
    ids[count] = entry.id;
    count += (entry.score > least) & (entry.id >= request.begin);
  }
  ids.resize(count);
  outcome.rescored += static_cast<int64_t>(count);
  if (request.num_always) {
    for (int32_t a = 0; a < request.num_always; ++a)
      if (counts(request, request.always[a])) ids.push_back(request.always[a]);
    std::sort(ids.begin(), ids.end());
    ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  }
  found.clear();
  score_exactly(request.queries + static_cast<int64_t>(i) * keys.size, keys, ids, found);
  keep_answers(request, i, found);
}

void search_graph(const Codes& codes, const Rows& keys, const Graph& graph,
                  const SearchRequest& request, SearchOutcome& outcome) {
  static thread_local SearchScratch scratch;
  static thread_local std::vector<int32_t> ids;
  outcome.found.assign(request.num_queries, {});
  if (request.prefix_len <= 0) return;
  with_chunks(codes, [&](auto chunks) {
    GraphSearch<chunks()> search(codes, graph, scratch);
    for (int first = 0; first < request.num_queries; first += kMaxGroup) {
      const GraphQuery query{
          .queries = request.queries + static_cast<int64_t>(first) * codes.size,
          .query_stride = codes.size,
          .num_queries = std::min(kMaxGroup, request.num_queries - first),
          .width = request.width,
          .keep = request.k ? static_cast<int32_t>(num_rescored(request.k)) : 0,
          .range = request.k ? -1.f : request.range,
          .window_max = request.window_max ? request.window_max + first : nullptr,
          .begin = static_cast<int32_t>(request.begin),
          .prefix_len = static_cast<int32_t>(request.prefix_len),
          .entries = request.entries,
          .num_entries = request.num_entries};
      search.run(query);
      outcome.distances += search.counts().distances;
      outcome.hops += search.counts().hops;
      outcome.code_bytes += search.counts().distances * codes.stride;
      SearchRequest part = request;
      part.queries = query.queries;
      part.window_max = query.window_max;
      for (int i = 0; i < query.num_queries; ++i)
        rescore(search, i, keys, part, ids, outcome, outcome.found[first + i]);
    }
  });
}

// Constant: what runs before `runs_here` was asked may not need the instruction set.
constexpr IndexKernels kernels_named(std::string_view name, bool (*runs_here)()) {
  return {
      name,        runs_here,    encode,       nearest,       refine_candidates, encode_query_only,
      build_graph, scan,         search_lists, search_blocks, search_graph,      score_range,
      mean_rows,   attend_found, attend_ids};
}

}  // namespace
}  // namespace relay::index

// SPDX-License-Identifier: Apache-2.0
// The functions of an index, once per instruction set, and the choice between them.
#pragma once

#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "views.h"

#ifndef RELAY_HAVE_AVX2
#define RELAY_HAVE_AVX2 0
#endif
#ifndef RELAY_HAVE_AVX512_VNNI
#define RELAY_HAVE_AVX512_VNNI 0
#endif

namespace relay::index {

struct GraphBuildOptions {
  int32_t projection_degree;  // M of the projection
  int32_t supply_degree;      // further edges from connectivity enhancement
  int32_t build_width;        // beam of the searches during the build
  int32_t pivot_rank;         // which of a query's keys take the others as candidates
  int32_t queries_per_pivot;  // how many queries a key takes candidates from
  float norm_weight;          // 0: inner products of keys, 1: their Euclidean distances
  int32_t num_threads;
};

struct SearchRequest {
  const float* queries;  // [num_queries, size]
  int32_t num_queries;
  int32_t k;  // 0: by range
  float range;
  int32_t width;
  const float* window_max;    // [num_queries] or null
  int64_t begin, prefix_len;  // the keys that count
  float scale;                // factor of the scores in the softmax
  // Of exact scans: how much of the attention weight may be left out; above 1: as much as the query
  // says, but tell how much it is; NaN: do not.
  float max_dropped_mass;
  bool weighs_unread;  // scans of keys in their order tell the weight of what they do not return
  const int32_t* entries;
  int32_t num_entries;
  const int32_t* always;  // keys whose codes are cut: scored whatever the search finds
  int32_t num_always;
};

inline bool counts(const SearchRequest& request, int64_t id) {
  return id >= request.begin && id < request.prefix_len;
}

constexpr int kMeanKeys = 64;  // whose values have one mean

// Weight of the keys that were not found, of `kMeanKeys` neighbours in turn: e^(scale * origin)
// times `weights`.
struct Unread {
  double origin = 0;
  std::vector<float> weights;
};

struct SearchOutcome {
  // of each query, best first; in the order of the keys where the unread is weighed
  std::vector<std::vector<Found>> found;
  std::vector<float> dropped_mass;  // at most; of each query, or empty
  std::vector<Unread> unread;       // of each query, or empty
  int64_t distances = 0, hops = 0, rescored = 0;
  int64_t code_bytes = 0;  // read of codes
};

// An inverted file: keys in lists, each list's keys in their order and from a new block on.
struct InvertedLists {
  const uint8_t* centres;  // blocks of codes
  int32_t num_lists;
  const uint8_t* blocks;
  const int64_t* starts;  // [num_lists]: first block
  const int32_t* counts;  // [num_lists]: keys
  const int32_t* ids;     // of each place of the blocks
};

// Keys in their order, in blocks of adjacent tokens.
struct TokenBlocks {
  const uint8_t* codes;  // blocks of the keys' codes
  // blocks of codes, one code for each token block: the mean, or the largest of each dimension
  const uint8_t* representatives;
  const uint8_t* smallest;  // of each dimension; null: representatives are means
  int32_t block_tokens;     // a multiple of kBlockKeys
};

// How many candidates by code are scored exactly for the k best; a graph scores all of a bucket.
inline size_t num_rescored(int32_t k) { return static_cast<size_t>(k) + (k / 8 > 12 ? k / 8 : 12); }

struct IndexKernels {
  std::string_view name;
  bool (*runs_here)();
  // Returns the longest code and the longest rounding error; see encode_keys.h.
  std::pair<float, float> (*encode)(const Rows& keys, const float* mean, const float* scale,
                                    int64_t begin, int64_t end, uint8_t* codes, int64_t stride,
                                    uint8_t* outside, int num_threads);
  void (*nearest)(const Codes&, const Rows& keys, const float* queries, int64_t num_queries,
                  int32_t k, std::span<const int32_t> always, int32_t* ids, int num_threads);
  // Of candidates [num_queries, num_candidates], as `nearest` would choose.
  void (*refine)(const Rows& keys, const float* queries, int64_t num_queries,
                 const int32_t* candidates, int64_t num_candidates, std::span<const int32_t> always,
                 int32_t k, int32_t* ids, int num_threads);
  void (*encode_query)(const Codes&, const float* query, int8_t* code);
  void (*build_graph)(const Codes&, const Rows& keys, const Graph&, const GraphBuildOptions&,
                      const int32_t* nearest, int64_t num_queries, int32_t k,
                      const int32_t* entries, int32_t num_entries);
  // Of all keys in `ranges`; exact but where the unread is weighed.
  void (*scan)(const Codes&, const SplitCodes&, const Rows& keys, std::span<const BlockRange>,
               const SearchRequest&, SearchOutcome&);
  void (*search_lists)(const Codes&, const InvertedLists&, const Rows& keys, const SearchRequest&,
                       SearchOutcome&);
  // With a `width` of 0, exact: takes bounds.
  void (*search_blocks)(const Codes&, const TokenBlocks&, const Rows& keys, const SearchRequest&,
                        SearchOutcome&);
  void (*search_graph)(const Codes&, const Rows& keys, const Graph&, const SearchRequest&,
                       SearchOutcome&);
  // Appends keys [begin, end) and their exact scores.
  void (*score_range)(const float* query, const Rows& keys, int64_t begin, int64_t end,
                      std::vector<Found>& found);
  // Means of `kMeanKeys` rows in turn, of the same type; the last one may be of fewer.
  void (*mean_rows)(const Rows&, void* means, int num_threads);
  // Attention of each query over what it found: writes outputs [queries, size] and log-sum-exps.
  // What was not found (of each query, or null) counts by the means of its values.
  void (*attend_found)(std::span<const std::vector<Found>>, const Rows& values, const Unread*,
                       const Rows& value_means, float scale, float* out, float* lse);
  // Over `ids`: writes the output, returns the log-sum-exp.
  float (*attend_ids)(const float* query, const Rows& keys, const Rows& values,
                      std::span<const int32_t> ids, float scale, float* out);
};

// The fastest that runs here, or the one of that name. Throws std::invalid_argument.
const IndexKernels& index_kernels(std::string_view name = "auto");
std::vector<std::string_view> index_kernel_names();

}  // namespace relay::index

// SPDX-License-Identifier: Apache-2.0
// What one call of an attention kernel is given. Plain data: every instruction set's translation
// unit sees the same bytes.
#pragma once

#include <cstdint>

namespace relay {

enum class DType : int { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

// A fold restarts at multiples of this many tokens from the start of every sequence, and the parts
// are merged in order. The boundaries depend on nothing but the token index, so a request's result
// does not depend on who shares its prefix, nor on the thread that computed which part.
constexpr int kSegmentTokens = 2048;

constexpr int kMaxHeadSize = 256;

// Masks, references and shared ranges are cut at multiples of this many tokens.
constexpr int kTileTokens = 32;

struct Entry {      // one query token, at its place in the execution order
  int32_t token;    // row of `query`
  int32_t visible;  // it sees KV tokens [0, visible), less what a sliding window hides
};

struct Span {  // KV tokens that a run of entries reads together
  int32_t first_entry, last_entry;
  int32_t begin_token, end_token;  // between them they see what they would see anyway
  int32_t request;                 // the block table row that names the blocks
};

struct RowBlock {  // entries whose state one thread keeps in its cache
  int32_t first_entry, last_entry;
  int32_t first_span, last_span;
};

struct WorkItem {  // a row block over some segments, for every kv head
  int32_t row_block;
  int32_t first_segment, last_segment;
  int32_t partial_entry;  // where the states of its segments go, one after the other, to be merged
                          // in a second pass; -1: the item has all segments and finishes its rows
};

// A segment of a row block, for every kv head, that several threads compute: first its scores, by
// tokens, then its weights, by rows, and then its outputs, by dims. Its spans have whole tiles of
// tokens, but for the last.
struct Division {
  int32_t row_block, segment;
  int32_t partial_entry;
  int32_t first_score;  // among the scores of a kv head, row after row
  int32_t row_scores;   // of one row, from the first token of the segment on
};

struct ScoreItem {
  int32_t division;
  int32_t begin_token, end_token;  // multiples of kTileTokens, between them all row_scores
};

struct WeightItem {
  int32_t division;
  int32_t first_row, last_row;  // of the row block
};

struct ValueItem {
  int32_t division;
  int32_t first_group, last_group;  // of 16 dims
};

struct Merge {  // the segments of a row block that were computed apart
  int32_t row_block;
  int32_t partial_entry;
  int32_t num_segments;
  int32_t has_divisions;
};

struct Plan {
  const Entry* entries;
  const Span* spans;
  const RowBlock* row_blocks;
  const WorkItem* items;
  const Division* divisions;
  const ScoreItem* score_items;
  const WeightItem* weight_items;
  const ValueItem* value_items;
  const Merge* merges;
  int32_t num_items, num_score_items, num_weight_items, num_value_items, num_merges;
  int32_t max_block_entries;    // the most entries in a row block
  int32_t num_partial_entries;  // entries in the partial states of one kv head
  int32_t num_scores;           // of the divisions, of one kv head
  int32_t num_threads;
  bool heads_first;   // items are taken for one kv head after the other, else one item after the
                      // other, which keeps the most expensive first
  bool hides_tokens;  // the spans of an entry do not cover all that it could see; only then does a
                      // span begin, or end before what its entries see, within a tile
};

struct Problem {
  DType dtype;
  int32_t num_heads, num_kv_heads, head_size, block_size;
  const void* query;  // [tokens, heads, head_size], strides in elements
  int64_t query_token_stride, query_head_stride;
  const void* kv_cache;  // [blocks, kv_heads, packed K then packed V], strides in elements
  bool is_float8;        // the elements of kv_cache, packed as those of dtype are
  int64_t kv_block_stride, kv_head_stride;
  const int32_t* block_table;
  int64_t block_table_stride;
  void* output;  // [tokens, heads, head_size], strides in elements
  int64_t output_token_stride, output_head_stride;
  float* lse;  // [tokens, heads] or null
  float scale;
  float v_scale = 1.f;        // factor of the values
  float logits_soft_cap;      // 0: none
  int32_t sliding_window;     // tokens a query sees, itself included; 0: all
  const float* alibi_slopes;  // [heads] or null
  const float* sinks;         // [heads] or null
};

}  // namespace relay

// SPDX-License-Identifier: Apache-2.0
// What attention over keys and values that lie token after token is given, beside a `Problem`.
// Plain data, as in problem.h.
#pragma once

#include <cstdint>

namespace relay {

struct KvAddress {  // of the first token of a run, for one kv head; a token takes head_size
                    // elements
  const void* keys;
  const void* values;
};

struct TokenRun {  // tokens of a sequence that lie one after the other
  int32_t begin_token, end_token;
};

struct UnpackedRequest {
  int32_t first_query, num_queries;  // rows of `query` and `output`
  int32_t begin_token, end_token;    // of its sequence, as far as it is read
  int32_t is_causal;  // the last query token sees all, each one before it a token less; 0: each all
  int32_t first_run, last_run;  // in token order, without gaps from begin_token to end_token
};

struct UnpackedBlock {  // query tokens of a request whose state one thread keeps in its cache
  int32_t request;
  int32_t first_query, last_query;  // counted from the request's first one
  int32_t first_row;                // rows of the blocks before it
};

struct UnpackedItem {  // blocks over some segments, for every kv head
  int32_t first_block, last_block;
  int32_t first_segment, last_segment;
};

struct Unpacked {
  const UnpackedRequest* requests;
  const TokenRun* runs;
  const KvAddress* addresses;  // [runs, kv_heads]
  const UnpackedBlock* blocks;
  const UnpackedItem* items;
  int32_t num_blocks, num_items;
  int32_t num_rows;       // of all blocks, of one kv head
  int32_t max_item_rows;  // the most rows of an item
  int32_t num_segments;   // up to the last token of any request
  int32_t num_threads;
  bool splits_segments;  // the states of all segments are kept, and merged in a second pass
  bool float_output;     // `output` is float32, whatever the type of the queries
};

}  // namespace relay

// SPDX-License-Identifier: Apache-2.0
// What an index is made of, as addresses and sizes; the Python faces own the memory and check it.
// What is read from a file row by row has a guard, whose pages are the rows: a row may be read
// after `verify`.
#pragma once

#include <cstdint>

#include "../storage/page_guard.h"
#include "damage.h"

namespace relay::index {

inline void verify_row(const PageGuard* guard, int64_t row) {
  if (guard) guard->verify(static_cast<size_t>(row));
}

enum class ElementType : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

// Rows of keys or values: [num_rows, size].
struct Rows {
  const void* data;
  ElementType type;
  int32_t size;
  int64_t num_rows;
  const PageGuard* guard = nullptr;
  bool is_finite = true;  // a number that is not is damage; false: it is what a model computed
};

// Keys in eight bits: key[i] is about mean[i] + scale[i] * (code[i] - 128). Rows are 64-byte
// aligned and as long as `stride`, a multiple of 64; what lies past the key is 128.
struct Codes {
  const uint8_t* data;
  int32_t stride;
  int32_t size;
  int64_t num_rows;
  const float* mean;   // [size]
  const float* scale;  // [size], positive
  // over all keys, in steps of the codes: the longest code and the longest rounding error
  float longest, longest_error;
  const PageGuard* guard = nullptr;  // of rows, or of blocks where codes lie in blocks
};

// Codes of keys in their order, in two halves: blocks of the upper four bits of each element, and
// rows of the lower four.
struct SplitCodes {
  const uint8_t* upper;
  const uint8_t* lower;
  const PageGuard* lower_guard = nullptr;  // of sixteen rows each
};

// Neighbours of node i: row[1 .. row[0]] of row i.
struct Graph {
  int32_t* rows;
  int32_t stride;
  const PageGuard* guard = nullptr;
};

// Neighbouring blocks of sixteen keys; `skip` are lanes of the first one that do not count.
struct BlockRange {
  int64_t first_block, num_keys;
  uint32_t skip;
};

struct Found {
  int32_t id;
  float score;
};

}  // namespace relay::index

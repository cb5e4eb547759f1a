// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "block_layout.h"
#include "views.h"

namespace relay::index {
namespace {

// Appends the blocks of keys [begin, end), which lie in their order, without those of `left_out`,
// which rise: their blocks become ranges of their own.
inline void append_ranges(int64_t begin, int64_t end, std::span<const int32_t> left_out,
                          std::vector<BlockRange>& ranges) {
  int64_t block = begin / kBlockKeys;
  // lanes before the first key that counts
  uint32_t skip = (1u << (begin % kBlockKeys)) - 1;
  const auto add = [&](int64_t to, uint32_t lanes) {
    const int64_t count = std::min(end, to * kBlockKeys) - block * kBlockKeys;
    if (count > 0) ranges.push_back({block, count, lanes});
    block = to;
  };
  auto next = std::lower_bound(left_out.begin(), left_out.end(), block * kBlockKeys);
  for (;;) {
    const int64_t next_block = next < left_out.end() ? *next / kBlockKeys : INT64_MAX / kBlockKeys;
    if (skip && next_block > block) {
      add(block + 1, skip);
      skip = 0;
    }
    add(next_block, 0);
    if (next_block * kBlockKeys >= end) return;
    for (; next < left_out.end() && *next / kBlockKeys == block; ++next)
      skip |= 1u << (*next % kBlockKeys);
  }
}

}  // namespace
}  // namespace relay::index

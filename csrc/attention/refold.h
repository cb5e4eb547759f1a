// SPDX-License-Identifier: Apache-2.0
// Rows that a segment left out of range (docs/kernels.md, 4).
#pragma once

#include <span>

#include "problem.h"
#include "row_state.h"

namespace relay {
namespace {

// What a partial sum of a segment is at most where no weight is above 1.
constexpr float kSafeSum = kSegmentTokens / kLanes;

// Clears those of rows [first_row, last_row) that overflowed and calls fold(rows, largest_sum) to
// fold them again, in ascending order: first with the sums that the kernel allows, as it may not
// have kept them, then, if outputs are too large all the same, with the smallest ones.
template <class Kernel, class F>
void refold_overflowed(const RowStates& states, int first_row, int last_row, int dim_groups,
                       F fold) {
  constexpr int kRowsAtOnce = 256;
  for (const float largest_sum : {Kernel::kLargestSum, kSafeSum}) {
    bool any = false;
    for (int row = first_row; row < last_row;) {
      int rows[kRowsAtOnce], count = 0;
      for (; row < last_row && count < kRowsAtOnce; ++row) {
        if (!overflowed(states, row, dim_groups, Kernel::kLargestSum)) continue;
        clear_row(states, row, dim_groups);
        rows[count++] = row;
      }
      if (count > 0) fold(std::span<const int>(rows, count), largest_sum);
      any |= count > 0;
    }
    if (!any) return;
  }
}

}  // namespace
}  // namespace relay

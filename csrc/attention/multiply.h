// SPDX-License-Identifier: Apache-2.0
// The one product both halves of attention are made of. A packed line holds 16 outputs times kPack
// neighbouring elements of the summed dimension:
//   scores:  line = 16 tokens x kPack dims, summed over the head dims, against a query row;
//   outputs: line = 16 dims x kPack tokens, summed over tokens, against a row of weights.
// Every row is its own chain of additions in the order of the summed dimension, so a row's result
// does not depend on the rows and columns beside it.
#pragma once

#include "bf16_products.h"

namespace relay {
namespace {

// What query rows and weights are stored as: bf16 where the machine multiplies bf16, else float.
template <class T>
struct OperandOf {
  using type = float;
  static constexpr int kWeightParts = 1;
};
#if RELAY_BF16_PRODUCTS
template <>
struct OperandOf<BFloat16> {
  using type = BFloat16;
#if defined(RELAY_ROUND_WEIGHTS)
  static constexpr int kWeightParts = 1;
#else
  // A weight is the sum of two bf16 values, 16 bits of mantissa: rounding weights to one bf16 costs
  // as much error as rounding the output does.
  static constexpr int kWeightParts = 2;
#endif
};
#endif
template <class T>
using Operand = typename OperandOf<T>::type;

struct NoPrefetch {
  template <int Lines>
  RELAY_INLINE void next() {}
};

// Cache lines to ask for at every step: the fewer rows, the less arithmetic there is to hide them.
template <int Rows>
constexpr int kPrefetchLines = Rows <= 4 ? 4 : 1;

// acc[r][c] += sum over steps of line(c, step) . operand(r, step), `Parts` operands apart by
// `part_stride`. Operands are kPack<T> elements a step. Calls `prefetch.next()` at every step.
template <class T, int Rows, int Columns, int Parts, class Prefetch>
RELAY_INLINE void multiply(const T* const (&lines)[Columns], int steps, const Operand<T>* operand,
                           int64_t row_stride, [[maybe_unused]] int64_t part_stride,
                           Vec16 (&acc)[Rows][Columns], Prefetch& prefetch,
                           [[maybe_unused]] Pair pair = Pair::kBoth) {
  constexpr int kStep = kPack<T>;
  constexpr int kLine = kLanes * kStep;
#pragma GCC unroll 1
  for (int s = 0; s < steps; ++s) {
    prefetch.template next<kPrefetchLines<Rows>>();
    if constexpr (kStep == 1) {
      Vec16 line[Columns];
#pragma GCC unroll 8
      for (int c = 0; c < Columns; ++c) line[c] = load_elements16(lines[c] + s * kLine);
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) {
        const Vec16 x = set16(operand[r * row_stride + s]);
#pragma GCC unroll 8
        for (int c = 0; c < Columns; ++c) acc[r][c] = fma16(line[c], x, acc[r][c]);
      }
#if RELAY_BF16_PRODUCTS
    } else {
      Pairs16 line[Columns];
#pragma GCC unroll 8
      for (int c = 0; c < Columns; ++c) line[c] = load_line16(lines[c] + s * kLine, pair);
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 2
        for (int part = 0; part < Parts; ++part) {
          const Pairs16 x =
              broadcast_pair16(operand + r * row_stride + part * part_stride + s * kStep);
#pragma GCC unroll 8
          for (int c = 0; c < Columns; ++c) acc[r][c] = add_products16(acc[r][c], line[c], x);
        }
      }
    }
#else
    } else {
      Vec16 even[Columns], odd[Columns];
#pragma GCC unroll 8
      for (int c = 0; c < Columns; ++c) load_pairs16(lines[c] + s * kLine, &even[c], &odd[c]);
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) {
        if (pair != Pair::kSecondOnly) {
          const Vec16 x = set16(operand[r * row_stride + s * kStep]);
#pragma GCC unroll 8
          for (int c = 0; c < Columns; ++c) acc[r][c] = fma16(even[c], x, acc[r][c]);
        }
        if (pair != Pair::kFirstOnly) {
          const Vec16 x = set16(operand[r * row_stride + s * kStep + 1]);
#pragma GCC unroll 8
          for (int c = 0; c < Columns; ++c) acc[r][c] = fma16(odd[c], x, acc[r][c]);
        }
      }
    }
#endif
  }
}

}  // namespace
}  // namespace relay

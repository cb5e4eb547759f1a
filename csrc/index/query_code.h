// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>

#include "../attention/vec16.h"
#include "row_dot.h"
#include "views.h"

namespace relay::index {
namespace {

constexpr float kRangeErrors = 2;  // a range reaches this many rounding errors further

// A query in eight bits. An inner product is about `offset + unit * dot(codes of the key, codes)`.
// In double: products of small queries and small steps would underflow in float.
struct QueryCode {
  double unit;
  double offset;
  double error;          // standard deviation of that, if rounding errors are independent
  double largest_error;  // how far it can be from the score that float arithmetic gives
  double float_error;    // how far that can be from the true score, of keys with a code
};

constexpr int kSumLanes = 8;  // sums of their own, so that one need not wait for the other

struct LaneSum {
  double of[kSumLanes] = {};
  double total() const {
    double sum = 0;
    for (const double each : of) sum += each;
    return sum;
  }
};

// Calls `body` with the number of an element and that of its lane.
template <class Body>
RELAY_INLINE void for_each_lane(int size, Body&& body) {
  int i = 0;
  for (; i + kSumLanes <= size; i += kSumLanes)
    for (int lane = 0; lane < kSumLanes; ++lane) body(i + lane, lane);
  for (int lane = 0; i + lane < size; ++lane) body(i + lane, lane);
}

// Writes `codes.stride` signed bytes. `upper` is of products with the upper four bits of the codes:
// the lower ones are taken for their middle.
inline QueryCode encode_query(const float* query, const Codes& codes, int8_t* out,
                              QueryCode* upper = nullptr) {
  LaneSum largest_of, mean_dots;
  for_each_lane(codes.size, [&](int i, int lane) {
    const double q = query[i];
    largest_of.of[lane] = std::max(largest_of.of[lane], std::fabs(q * codes.scale[i]));
    mean_dots.of[lane] += q * codes.mean[i];
  });
  const double largest = *std::max_element(std::begin(largest_of.of), std::end(largest_of.of));
  const double unit = largest > 0 ? largest / 127 : 1, inverse = 1 / unit;
  LaneSum sums, distances, all_squares, totals, all_residuals, magnitudes;
  for_each_lane(codes.size, [&](int i, int lane) {
    const double q = query[i], scaled = q * codes.scale[i];
    const double code = std::rint(scaled * inverse);
    out[i] = static_cast<int8_t>(code);
    sums.of[lane] += code;
    distances.of[lane] += std::fabs(code);
    all_squares.of[lane] += scaled * scaled;
    totals.of[lane] += std::fabs(scaled);
    const double residual = scaled - unit * code;
    all_residuals.of[lane] += residual * residual;
    magnitudes.of[lane] +=
        std::fabs(q) * (std::fabs(double{codes.mean[i]}) + 128.0 * codes.scale[i]);
  });
  const double squares = all_squares.total(), residuals = all_residuals.total();
  for (int i = codes.size; i < codes.stride; ++i) out[i] = 0;
  QueryCode form;
  form.unit = unit;
  form.offset = mean_dots.total() - unit * 128 * sums.total();
  constexpr double kTypicalCode = 30, kSmallestFloat = 0x1p-149;
  form.error = std::sqrt(squares / 12.f + residuals * kTypicalCode * kTypicalCode);
  form.float_error = kFloatRounding * magnitudes.total();
  form.largest_error = std::min(totals.total() / 2, std::sqrt(squares) * codes.longest_error) +
                       std::sqrt(residuals) * codes.longest + form.float_error +
                       (largest > 0 ? kSmallestFloat * codes.size : 0);
  if (upper) {
    constexpr double kMiddle = 7.5;
    *upper = form;
    upper->unit = 16 * unit;
    upper->offset = form.offset + unit * kMiddle * sums.total();
    upper->error = std::sqrt(256 * squares / 12 + residuals * kTypicalCode * kTypicalCode);
    upper->largest_error = form.largest_error + unit * kMiddle * distances.total();
  }
  return form;
}

}  // namespace
}  // namespace relay::index

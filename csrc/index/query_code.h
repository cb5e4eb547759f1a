// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>

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
  double float_error;    // how far that can be from the true score
};

// Writes `codes.stride` signed bytes.
inline QueryCode encode_query(const float* query, const Codes& codes, int8_t* out) {
  double largest = 0, mean_dot = 0;
  for (int i = 0; i < codes.size; ++i) {
    const double q = query[i];
    largest = std::max(largest, std::fabs(q * codes.scale[i]));
    mean_dot += q * codes.mean[i];
  }
  const double unit = largest > 0 ? largest / 127 : 1, inverse = 1 / unit;
  int32_t sum = 0;
  double squares = 0, total = 0, residuals = 0, magnitude = 0;
  for (int i = 0; i < codes.size; ++i) {
    const double q = query[i], scaled = q * codes.scale[i];
    const int code = static_cast<int>(std::rint(scaled * inverse));
    out[i] = static_cast<int8_t>(code);
    sum += code;
    squares += scaled * scaled;
    total += std::fabs(scaled);
    const double residual = scaled - unit * code;
    residuals += residual * residual;
    magnitude += std::fabs(q) * (std::fabs(double{codes.mean[i]}) + 128.0 * codes.scale[i]);
  }
  for (int i = codes.size; i < codes.stride; ++i) out[i] = 0;
  QueryCode form;
  form.unit = unit;
  form.offset = mean_dot - unit * 128 * sum;
  constexpr double kTypicalCode = 30, kFloatRounding = 4e-6, kSmallestFloat = 0x1p-149;
  form.error = std::sqrt(squares / 12.f + residuals * kTypicalCode * kTypicalCode);
  form.float_error = kFloatRounding * magnitude;
  form.largest_error = std::min(total / 2, std::sqrt(squares) * codes.longest_error) +
                       std::sqrt(residuals) * codes.longest + form.float_error +
                       (largest > 0 ? kSmallestFloat * codes.size : 0);
  return form;
}

}  // namespace
}  // namespace relay::index

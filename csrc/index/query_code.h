// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>

#include "views.h"

namespace relay::index {
namespace {

constexpr float kRangeErrors = 2;  // a range reaches this many rounding errors further

// A query in eight bits. An inner product is about `offset + unit * dot(codes of the key, codes)`.
struct QueryCode {
  float unit;
  float offset;
  float error;          // standard deviation of that, if rounding errors are independent
  float largest_error;  // what it can be off by at most
};

// Writes `codes.stride` signed bytes.
inline QueryCode encode_query(const float* query, const Codes& codes, int8_t* out) {
  float largest = 0.f, mean_dot = 0.f;
  for (int i = 0; i < codes.size; ++i) {
    largest = std::max(largest, std::fabs(query[i] * codes.scale[i]));
    mean_dot += query[i] * codes.mean[i];
  }
  const float unit = largest > 0.f ? largest / 127.f : 1.f, inverse = 1.f / unit;
  int32_t sum = 0;
  float squares = 0.f, total = 0.f, residuals = 0.f, magnitude = 0.f;
  for (int i = 0; i < codes.size; ++i) {
    const float scaled = query[i] * codes.scale[i];
    const int code = static_cast<int>(std::nearbyintf(scaled * inverse));
    out[i] = static_cast<int8_t>(code);
    sum += code;
    squares += scaled * scaled;
    total += std::fabs(scaled);
    const float residual = scaled - unit * static_cast<float>(code);
    residuals += residual * residual;
    magnitude += std::fabs(query[i]) * (std::fabs(codes.mean[i]) + 128.f * codes.scale[i]);
  }
  for (int i = codes.size; i < codes.stride; ++i) out[i] = 0;
  QueryCode form;
  form.unit = unit;
  form.offset = mean_dot - unit * 128.f * static_cast<float>(sum);
  constexpr float kTypicalCode = 30.f, kFloatRounding = 4e-6f;
  form.error = std::sqrt(squares / 12.f + residuals * kTypicalCode * kTypicalCode);
  form.largest_error = std::min(total / 2.f, std::sqrt(squares) * codes.longest_error) +
                       std::sqrt(residuals) * codes.longest + kFloatRounding * magnitude;
  return form;
}

}  // namespace
}  // namespace relay::index

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <span>

#include "rescore.h"

namespace relay::index {
namespace {

// Softmax-weighted sum of the values of `found`, whose scores are inner products. Writes
// values.size floats and returns the logarithm of the denominator: 0 and -inf where there are none.
inline float attend_found(std::span<const Found> found, const Rows& values, float scale,
                          float* out) {
  std::fill(out, out + values.size, 0.f);
  if (found.empty()) return -INFINITY;
  float top = -INFINITY;
  for (const Found& f : found) top = std::max(top, f.score * scale);
  double denominator = 0;
  const auto weight_of = [&](const Found& f) { return std::exp(f.score * scale - top); };
  with_elements(values, [&](const auto* rows) {
    const auto row = [&](size_t i) {
      return rows + static_cast<int64_t>(found[i].id) * values.size;
    };
    constexpr size_t ahead = 8;
    for (size_t i = 0; i < std::min(ahead, found.size()); ++i)
      prefetch_elements(row(i), values.size);
    for (size_t i = 0; i < found.size(); ++i) {
      if (i + ahead < found.size()) prefetch_elements(row(i + ahead), values.size);
      verify_row(values.guard, found[i].id);
      const float weight = weight_of(found[i]);
      denominator += weight;
      const auto* value = row(i);
      const Vec16 weights = set16(weight);
      int32_t d = 0;
      for (; d + kLanes <= values.size; d += kLanes)
        store16(out + d, fma16(weights, load_row16(value + d), load16(out + d)));
      for (; d < values.size; ++d) out[d] += weight * to_float(value[d]);
    }
  });
  const auto inverse = static_cast<float>(1 / denominator);
  for (int32_t d = 0; d < values.size; ++d) out[d] *= inverse;
  return top + static_cast<float>(std::log(denominator));
}

// The exact scores of `ids`, then as above.
inline float attend_ids(const float* query, const Rows& keys, const Rows& values,
                        std::span<const int32_t> ids, float scale, float* out) {
  static thread_local std::vector<Found> found;
  found.clear();
  score_exactly(query, keys, ids, found);
  return attend_found(found, values, scale, out);
}

}  // namespace
}  // namespace relay::index

// SPDX-License-Identifier: Apache-2.0
// From candidates by their codes to exact scores.
#pragma once

#include <cmath>
#include <span>

#include "found_order.h"
#include "kernels.h"
#include "row_dot.h"

namespace relay::index {
namespace {

template <class T>
RELAY_INLINE void prefetch_elements(const T* row, int32_t size) {
  const char* bytes = reinterpret_cast<const char*>(row);
  for (size_t at = 0; at < sizeof(T) * size; at += 64) __builtin_prefetch(bytes + at);
}

// Scores `ids` and appends them to `found`.
inline void score_exactly(const float* query, const Rows& keys, std::span<const int32_t> ids,
                          std::vector<Found>& found) {
  with_elements(keys, [&](const auto* rows) {
    const auto row = [&](int32_t id) { return rows + static_cast<int64_t>(id) * keys.size; };
    constexpr size_t ahead = 8;
    const size_t before = found.size();
    found.resize(before + ids.size());
    for (size_t i = 0; i < std::min(ahead, ids.size()); ++i)
      prefetch_elements(row(ids[i]), keys.size);
    for (size_t i = 0; i < ids.size(); ++i) {
      if (i + ahead < ids.size()) prefetch_elements(row(ids[i + ahead]), keys.size);
      verify_row(keys.guard, ids[i]);
      float score = dot_row(query, row(ids[i]), keys.size);
      if (!std::isfinite(score)) score = dot_row_widely(query, row(ids[i]), keys.size);
      found[before + i] = {ids[i], score};
    }
  });
}

// Sorts `found` and leaves what the request asks for.
inline void keep_answers(const SearchRequest& request, int query, std::vector<Found>& found) {
  if (request.k) return sort_best(found, request.k);
  float best = request.window_max ? request.window_max[query] : -INFINITY;
  for (const Found& f : found) best = std::max(best, f.score);
  std::erase_if(found, [&](const Found& f) { return f.score < best - request.range; });
  sort_best(found, found.size());
}

}  // namespace
}  // namespace relay::index

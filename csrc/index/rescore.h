// SPDX-License-Identifier: Apache-2.0
// From candidates by their codes to exact scores.
#pragma once

#include <cmath>
#include <limits>
#include <span>

#include "found_order.h"
#include "kernels.h"
#include "row_dot.h"

namespace relay::index {
namespace {

constexpr double kLargest = std::numeric_limits<float>::max();

template <class T>
RELAY_INLINE void prefetch_elements(const T* row, int32_t size) {
  const char* bytes = reinterpret_cast<const char*>(row);
  for (size_t at = 0; at < sizeof(T) * size; at += 64) __builtin_prefetch(bytes + at);
}

// The score of a key whose sum in float is not finite: the nearest float.
template <class T>
float widely_scored(const float* query, const T* row, const Rows& keys, int32_t id) {
  const double score = dot_row_widely(query, row, keys.size);
  if (std::isfinite(score)) return static_cast<float>(std::clamp(score, -kLargest, kLargest));
  if (keys.is_finite) throw_damaged_row("a key that is not finite", id);
  return static_cast<float>(score);
}

// Scores the keys id_of(0) to id_of(count - 1) and appends them to `found`.
template <class IdOf>
inline void score_keys(const float* query, const Rows& keys, size_t count, const IdOf& id_of,
                       std::vector<Found>& found) {
  with_elements(keys, [&](const auto* rows) {
    const auto row = [&](int32_t id) { return rows + static_cast<int64_t>(id) * keys.size; };
    constexpr size_t ahead = 8;
    const size_t before = found.size();
    found.resize(before + count);
    for (size_t i = 0; i < std::min(ahead, count); ++i) prefetch_elements(row(id_of(i)), keys.size);
    for (size_t i = 0; i < count; ++i) {
      if (i + ahead < count) prefetch_elements(row(id_of(i + ahead)), keys.size);
      const int32_t id = id_of(i);
      verify_row(keys.guard, id);
      float score = dot_row(query, row(id), keys.size);
      if (!std::isfinite(score)) [[unlikely]]
        score = widely_scored(query, row(id), keys, id);
      found[before + i] = {id, score};
    }
  });
}

inline void score_exactly(const float* query, const Rows& keys, std::span<const int32_t> ids,
                          std::vector<Found>& found) {
  score_keys(query, keys, ids.size(), [&](size_t i) { return ids[i]; }, found);
}

inline void score_range(const float* query, const Rows& keys, int64_t begin, int64_t end,
                        std::vector<Found>& found) {
  const auto id_of = [&](size_t i) { return static_cast<int32_t>(begin + i); };
  if (begin < end) score_keys(query, keys, static_cast<size_t>(end - begin), id_of, found);
}

// How far the exact score of one of these keys can be from the true one.
inline double largest_rounding(const float* query, const Rows& keys, std::span<const int32_t> ids) {
  double largest = 0;
  with_elements(keys, [&](const auto* rows) {
    for (const int32_t id : ids) {
      const auto* row = rows + static_cast<int64_t>(id) * keys.size;
      double magnitude = 0;
      for (int32_t d = 0; d < keys.size; ++d)
        magnitude += std::fabs(double{query[d]} * to_float(row[d]));
      largest = std::max(largest, magnitude);
    }
  });
  return kFloatRounding * largest;
}

// The end of the range that a request asks for.
inline float least_in_range(const SearchRequest& request, int query, std::span<const Found> found) {
  float best = request.window_max ? request.window_max[query] : -INFINITY;
  for (const Found& f : found) best = std::max(best, f.score);
  return best - request.range;
}

// Sorts `found` and leaves what the request asks for.
inline void keep_answers(const SearchRequest& request, int query, std::vector<Found>& found) {
  if (request.k) return sort_best(found, request.k);
  const float least = least_in_range(request, query, found);
  std::erase_if(found, [&](const Found& f) { return f.score < least; });
  sort_best(found, found.size());
}

}  // namespace
}  // namespace relay::index

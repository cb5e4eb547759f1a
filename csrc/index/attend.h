// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <span>

#include "rescore.h"

namespace relay::index {
namespace {

// out[d] += weight * row[d]
template <class T>
RELAY_INLINE void add_row(float weight, const T* row, int32_t size, float* out) {
  const Vec16 weights = set16(weight);
  int32_t d = 0;
  for (; d + kLanes <= size; d += kLanes)
    store16(out + d, fma16(weights, load_row16(row + d), load16(out + d)));
  for (; d < size; ++d) out[d] += weight * to_float(row[d]);
}

inline void mean_rows(const Rows& rows, void* means, int num_threads) {
  with_elements(rows, [&](const auto* elements) {
    using T = std::remove_cvref_t<decltype(*elements)>;
    T* const out = static_cast<T*>(means);
    const int64_t num_means = (rows.num_rows + kMeanKeys - 1) / kMeanKeys;
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t m = 0; m < num_means; ++m) {
      std::vector<float> sum(rows.size, 0.f);
      const int64_t first = m * kMeanKeys, end = std::min(first + kMeanKeys, rows.num_rows);
      const float weight = 1 / static_cast<float>(end - first);
      for (int64_t row = first; row < end; ++row)
        add_row(weight, elements + row * rows.size, rows.size, sum.data());
      for (int32_t d = 0; d < rows.size; ++d) from_float(sum[d], out + m * rows.size + d);
    }
  });
}

// e^(scale * score - top) of each, and their sum.
inline double weigh(std::span<const Found> found, float scale, double top,
                    std::vector<float>& weights) {
  weights.resize((found.size() + kLanes - 1) / kLanes * kLanes);
  double sum = 0;
  for (size_t i = 0; i < found.size(); i += kLanes) {
    alignas(64) float exponents[kLanes];
    for (int lane = 0; lane < kLanes; ++lane)
      exponents[lane] = i + lane < found.size()
                            ? static_cast<float>(found[i + lane].score * scale - top)
                            : -INFINITY;
    const Vec16 each = exp2_16(load16(exponents) * set16(kLog2E));
    store16(weights.data() + i, each);
    sum += sum_of16(each);
  }
  return sum;
}

// Adds the weighted values of `found`; `rows` are those of `values`.
template <class T>
void add_rows(std::span<const Found> found, const float* weights, const Rows& values, const T* rows,
              float* out) {
  constexpr int kHeld = 8;  // sums of so many lanes stay in registers
  constexpr size_t ahead = 8;
  const auto row = [&](size_t i) { return rows + static_cast<int64_t>(found[i].id) * values.size; };
  for (size_t i = 0; i < std::min(ahead, found.size()); ++i) prefetch_elements(row(i), values.size);
  int32_t d = 0;
  for (; d + kHeld * kLanes <= values.size; d += kHeld * kLanes) {
    Vec16 sums[kHeld];
    for (int held = 0; held < kHeld; ++held) sums[held] = load16(out + d + held * kLanes);
    for (size_t i = 0; i < found.size(); ++i) {
      if (i + ahead < found.size()) prefetch_elements(row(i + ahead), values.size);
      verify_row(values.guard, found[i].id);
      const Vec16 weight = set16(weights[i]);
      for (int held = 0; held < kHeld; ++held)
        sums[held] = fma16(weight, load_row16(row(i) + d + held * kLanes), sums[held]);
    }
    for (int held = 0; held < kHeld; ++held) store16(out + d + held * kLanes, sums[held]);
  }
  if (d == values.size) return;
  for (size_t i = 0; i < found.size(); ++i) {
    if (i + ahead < found.size()) prefetch_elements(row(i + ahead), values.size);
    verify_row(values.guard, found[i].id);
    add_row(weights[i], row(i) + d, values.size - d, out + d);
  }
}

// After a sum that is not finite.
inline void check_values(std::span<const Found> found, const Rows& values) {
  with_elements(values, [&](const auto* rows) {
    for (const Found& each : found)
      for (int32_t d = 0; d < values.size; ++d)
        if (!std::isfinite(to_float(rows[static_cast<int64_t>(each.id) * values.size + d])))
          throw_damaged_row("a value that is not finite", each.id);
  });
}

// Attention of one query, whose values are added a part at a time.
struct ValueSum {
  std::vector<float> mean_weights;  // of the means of what was not found; empty: all was
  std::vector<float> weights;       // of what was found
  size_t num_added = 0;             // of it
  double top = -INFINITY;           // exponents are below it
  double denominator = 0;
};

inline ValueSum begin_sum(std::span<const Found> found, const Unread* unread, float scale) {
  ValueSum sum;
  double unread_weight = 0;
  // codes that tell more than a float can hold tell nothing: a file may say anything of them
  if (unread && std::fabs(scale * unread->origin) < 1e30)
    for (const float each : unread->weights) unread_weight += each;
  if (unread_weight > 0) sum.top = scale * unread->origin + std::log(unread_weight);
  float best = -INFINITY;
  for (const Found& f : found) best = std::max(best, f.score);
  sum.top = std::max<double>(sum.top, best * scale);
  if (unread_weight > 0) {
    const double factor = std::exp(scale * unread->origin - sum.top);
    sum.denominator += unread_weight * factor;
    // all that are left out together weigh a millionth
    const size_t num_means = unread->weights.size();
    const double least = 1e-6 * unread_weight / static_cast<double>(num_means);
    sum.mean_weights.resize(num_means);
    for (size_t m = 0; m < num_means; ++m) {
      const float each = unread->weights[m];
      sum.mean_weights[m] = each > least ? static_cast<float>(each * factor) : 0.f;
    }
  }
  sum.denominator += weigh(found, scale, sum.top, sum.weights);
  return sum;
}

// Adds the weighted means of `Queries` neighbouring queries, each of which is loaded once for all.
template <int Queries, class T>
void add_means(const ValueSum* sums, const Rows& means, const T* rows, float* out) {
  constexpr int kHeld = 4;  // sums of so many lanes of each query stay in registers
  const auto for_each_mean = [&](auto&& add) {
    for (int64_t m = 0; m < means.num_rows; ++m) {
      float weights[Queries], any = 0;
      for (int q = 0; q < Queries; ++q) any += weights[q] = sums[q].mean_weights[m];
      // what weighs nothing may hold anything
      if (any > 0) add(weights, rows + m * means.size);
    }
  };
  int32_t d = 0;
  for (; d + kHeld * kLanes <= means.size; d += kHeld * kLanes) {
    Vec16 totals[Queries][kHeld];
#pragma GCC unroll 4
    for (int q = 0; q < Queries; ++q)
#pragma GCC unroll 4
      for (int held = 0; held < kHeld; ++held)
        totals[q][held] = load16(out + q * means.size + d + held * kLanes);
    for_each_mean([&](const float* weights, const T* row) {
#pragma GCC unroll 4
      for (int held = 0; held < kHeld; ++held) {
        const Vec16 elements = load_row16(row + d + held * kLanes);
#pragma GCC unroll 4
        for (int q = 0; q < Queries; ++q)
          totals[q][held] = fma16(set16(weights[q]), elements, totals[q][held]);
      }
    });
#pragma GCC unroll 4
    for (int q = 0; q < Queries; ++q)
#pragma GCC unroll 4
      for (int held = 0; held < kHeld; ++held)
        store16(out + q * means.size + d + held * kLanes, totals[q][held]);
  }
  if (d == means.size) return;
  for_each_mean([&](const float* weights, const T* row) {
    for (int q = 0; q < Queries; ++q)
      add_row(weights[q], row + d, means.size - d, out + q * means.size + d);
  });
}

// The same of all that have means.
inline void add_means(std::span<const ValueSum> sums, const Rows& means, float* out) {
  with_elements(means, [&](const auto* rows) {
    const auto have_means = [&](size_t q, size_t count) {
      return q + count <= sums.size() &&
             std::all_of(sums.begin() + q, sums.begin() + q + count,
                         [](const ValueSum& sum) { return !sum.mean_weights.empty(); });
    };
    for (size_t q = 0; q < sums.size();) {
      const auto add = [&](auto count) {
        add_means<count()>(&sums[q], means, rows, out + q * means.size);
        q += count();
      };
      if (have_means(q, 4))
        add(std::integral_constant<int, 4>());
      else if (have_means(q, 1))
        add(std::integral_constant<int, 1>());
      else
        ++q;
    }
  });
}

constexpr int64_t kValuesAtATime = int64_t{1} << 19;  // bytes, well within a second-level cache

// Softmax-weighted sums of the values that each query found, whose scores are inner products, and
// of the means of what it did not find (`unread`, of each query, or null). Writes [queries,
// values.size] and the logarithms of the denominators: 0 and -inf where there is nothing.
inline void attend_found(std::span<const std::vector<Found>> found, const Rows& values,
                         const Unread* unread, const Rows& value_means, float scale, float* out,
                         float* lse) {
  std::vector<ValueSum> sums(found.size());
  std::fill_n(out, found.size() * values.size, 0.f);
  for (size_t q = 0; q < found.size(); ++q)
    sums[q] = begin_sum(found[q], unread ? unread + q : nullptr, scale);
  if (unread) add_means(sums, value_means, out);
  with_elements(values, [&](const auto* rows) {
    // all queries meet a part of the values before the next one: they read many of the same
    const int64_t at_a_time =
        found.size() < 2 ? values.num_rows
                         : std::max<int64_t>(1, kValuesAtATime / (sizeof(*rows) * values.size));
    for (int64_t end = at_a_time; end < values.num_rows + at_a_time; end += at_a_time)
      for (size_t q = 0; q < found.size(); ++q) {
        const std::span<const Found> left = std::span(found[q]).subspan(sums[q].num_added);
        size_t count = 0;
        while (count < left.size() && (left[count].id < end || end >= values.num_rows)) ++count;
        add_rows(left.first(count), sums[q].weights.data() + sums[q].num_added, values, rows,
                 out + q * values.size);
        sums[q].num_added += count;
      }
  });
  for (size_t q = 0; q < found.size(); ++q) {
    const ValueSum& sum = sums[q];
    lse[q] = static_cast<float>(sum.top + std::log(sum.denominator));
    if (!(sum.denominator > 0 || std::isnan(sum.denominator))) {  // there is nothing
      lse[q] = -INFINITY;
      continue;
    }
    const auto inverse = static_cast<float>(1 / sum.denominator);
    bool is_finite = true;
    for (int32_t d = 0; d < values.size; ++d) {
      float& each = out[q * values.size + d];
      each *= inverse;
      is_finite &= std::isfinite(each);
    }
    if (!is_finite && values.is_finite) [[unlikely]]
      check_values(found[q], values);
  }
}

// The exact scores of `ids`, then as above.
inline float attend_ids(const float* query, const Rows& keys, const Rows& values,
                        std::span<const int32_t> ids, float scale, float* out) {
  static thread_local std::vector<Found> found;
  found.clear();
  score_exactly(query, keys, ids, found);
  float lse;
  attend_found({&found, 1}, values, nullptr, {}, scale, out, &lse);
  return lse;
}

}  // namespace
}  // namespace relay::index

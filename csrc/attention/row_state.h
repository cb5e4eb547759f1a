// SPDX-License-Identifier: Apache-2.0
// The running state of attention rows. A row's output is sum(w * v) / sum(w), w = 2^(score - R),
// with scores in units of log2 and an integer reference R, chosen from the row's first visible tile
// and raised when weights grow. Changing R multiplies everything by a power of two, which floating
// point does exactly, so states merge without exponentials and without rounding the weights again.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "vec16.h"

namespace relay {
namespace {

constexpr float kLargestReference = 0x1p100f;
constexpr float kUnset = -std::numeric_limits<float>::infinity();  // reference of an empty state

struct RowStates {
  float* outputs;        // unnormalised, group_stride floats from one 16-dim group to the next
  int64_t row_stride;    // floats
  int64_t group_stride;  // floats
  float* sums;           // 16 partial sums of weights a row
  float* references;     // one a row, kUnset while nothing was visible

  RELAY_INLINE float* output(int64_t row, int group) const {
    return outputs + row * row_stride + group * group_stride;
  }
  RowStates from(int64_t row) const {
    return {outputs + row * row_stride, row_stride, group_stride, sums + row * kLanes,
            references + row};
  }
};

[[maybe_unused]] void clear_row(const RowStates& states, int row, int groups) {
  states.references[row] = kUnset;
  store16(states.sums + row * kLanes, zero16());
  for (int g = 0; g < groups; ++g) store16(states.output(row, g), zero16());
}

[[maybe_unused]] void copy_row(const RowStates& from, int64_t from_row, const RowStates& to,
                               int64_t to_row, int groups) {
  to.references[to_row] = from.references[from_row];
  store16(to.sums + to_row * kLanes, load16(from.sums + from_row * kLanes));
  for (int g = 0; g < groups; ++g) store16(to.output(to_row, g), load16(from.output(from_row, g)));
}

// A power of two that is at most 1, in two factors: weights far above 1 may be of use below 2^-126
// of themselves, and smaller factors are flushed to zero.
struct ScaleDown {
  Vec16 first, second;
  explicit ScaleDown(float exponent)
      : first(set16(std::exp2(std::ceil(exponent / 2)))),
        second(set16(std::exp2(std::floor(exponent / 2)))) {}
  RELAY_INLINE Vec16 of(Vec16 x) const { return x * first * second; }
};

// total <- total + part, for one row. The empty state is neutral.
[[maybe_unused]] void merge_row(const RowStates& total, int64_t total_row, const RowStates& part,
                                int64_t part_row, int groups) {
  const float part_reference = part.references[part_row];
  if (part_reference == kUnset) return;
  const float total_reference = total.references[total_row];
  if (total_reference == kUnset) {
    copy_row(part, part_row, total, total_row, groups);
    return;
  }
  const bool grows = part_reference > total_reference;
  const ScaleDown scale(-std::fabs(part_reference - total_reference));
  const auto merge = [&](float* into, const float* from) {
    const Vec16 old = load16(into), added = load16(from);
    store16(into, grows ? scale.of(old) + added : old + scale.of(added));
  };
  if (grows) total.references[total_row] = part_reference;
  merge(total.sums + total_row * kLanes, part.sums + part_row * kLanes);
  for (int g = 0; g < groups; ++g) merge(total.output(total_row, g), part.output(part_row, g));
}

// Raises a row's reference so far that neither its sums nor a score of `largest` weigh more than 1.
// Sums that are out of range already stay so, and a reference stays finite: infinite or undefined
// scores end as NaN outputs.
[[maybe_unused]] void raise_reference(const RowStates& states, int64_t row, int groups,
                                      float largest, float largest_sum) {
  float* sums = states.sums + row * kLanes;
  if (!all_at_most16(load16(sums), largest_sum)) return;
  float& reference = states.references[row];
  int sum_log2 = 0;
  std::frexp(max_of16(load16(sums)), &sum_log2);
  const float raised = std::max(largest, reference + static_cast<float>(sum_log2));
  if (!(std::fabs(raised) <= kLargestReference)) return;
  const ScaleDown scale(reference - raised);
  store16(sums, scale.of(load16(sums)));
  for (int g = 0; g < groups; ++g) {
    float* output = states.output(row, g);
    store16(output, scale.of(load16(output)));
  }
  reference = raised;
}

// True if a weight, a sum or an output grew out of range: the reference was too small for this row.
[[maybe_unused]] bool overflowed(const RowStates& states, int row, int groups, float largest_sum) {
  if (states.references[row] == kUnset) return false;
  if (!all_at_most16(load16(states.sums + row * kLanes), largest_sum)) return true;
  bool finite = true;
  for (int g = 0; g < groups; ++g) {
    finite &=
        all_at_most16(abs16(load16(states.output(row, g))), std::numeric_limits<float>::max());
  }
  return !finite;
}

// What normalising a row needs: output = outputs * power * scale. Two factors, because next to a
// large sink their product is no normal float while the output is one. The weights sum up to
// `sum` * 2^`reference`.
struct Normaliser {
  float power, scale;
  double sum, reference;

  float lse() const {  // in natural log units
    constexpr double kLn2 = 0.6931471805599453;
    return static_cast<float>(std::log(sum) + reference * kLn2);
  }
};

[[maybe_unused]] Normaliser normaliser(const RowStates& states, int64_t row, const float* sink) {
  constexpr double kLog2EDouble = 1.4426950408889634;
  const double reference = states.references[row];
  if (states.references[row] == kUnset)
    return {0.f, 0.f, sink ? 1.0 : 0.0, sink ? *sink * kLog2EDouble : 0.0};
  const double sum = sum_of16(load16(states.sums + row * kLanes));
  if (!sink) return {1.f, static_cast<float>(1.0 / sum), sum, reference};
  const double sink_log2 = double{*sink} * kLog2EDouble;
  const double top = reference > sink_log2 ? reference : std::ceil(sink_log2);
  const double total = sum * std::exp2(reference - top) + std::exp2(sink_log2 - top);
  const double power = reference - top > -60.0 ? reference - top : -60.0;
  return {static_cast<float>(std::exp2(power)),
          static_cast<float>(std::exp2(reference - top - power) / total), total, top};
}

}  // namespace
}  // namespace relay

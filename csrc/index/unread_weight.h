// SPDX-License-Identifier: Apache-2.0
// The attention weight of keys that a scan does not return, by their codes: one sum for each
// `kMeanKeys` neighbouring keys, which counts for the mean of their values (docs/key-index.md).
#pragma once

#include <bit>
#include <climits>
#include <span>

#include "../attention/vec16.h"
#include "aligned_vector.h"
#include "candidate_list.h"
#include "code_blocks.h"
#include "query_code.h"

namespace relay::index {
namespace {

constexpr int kMeanBlocks = kMeanKeys / kBlockKeys;

// Sums of e^(scale * score) relative to a score that rises with the best one. Each lane of a code
// block has its own: what is subtracted later is what was added.
class UnreadWeight {
 public:
  void reset(const QueryCode& form, double scale, int64_t num_keys, double expected_best) {
    form_ = &form;
    scale_ = scale;
    rate_ = scale * form.unit * kLog2E;
    rate_in_float_ = static_cast<float>(rate_);
    lanes_.assign((num_keys + kMeanKeys - 1) / kMeanKeys * kBlockKeys, 0.f);
    set_origin(std::isfinite(expected_best) ? to_code(expected_best) : INT_MIN / 2);
  }

  // Scores of `Blocks` neighbouring code blocks, at most four, of which the `valid` lanes count.
  // `best` is the best score so far.
  template <int Blocks>
  RELAY_INLINE void add(const int32_t* scores, int64_t block, uint64_t valid, int32_t best) {
    if (best > ceiling_) [[unlikely]]
      move_origin(best);
    if (Blocks == kMeanBlocks && block % kMeanBlocks == 0 && !~valid) [[likely]] {
      Vec16 sum = weights(scores);
      for (int b = 1; b < Blocks; ++b) sum = sum + weights(scores + b * kBlockKeys);
      add_to(block / kMeanBlocks, sum);
      return;
    }
    for (int b = 0; b < Blocks; ++b) {
      alignas(64) float each[kBlockKeys];
      store16(each, weights(scores + b * kBlockKeys));
      for (int lane = 0; lane < kBlockKeys; ++lane)
        if (!(valid >> (b * kBlockKeys + lane) & 1)) each[lane] = 0;
      add_to((block + b) / kMeanBlocks, load16(each));
    }
  }

  // These are read: their weights by code count no more.
  void remove(const Candidate* from, const Candidate* to) {
    alignas(64) int32_t scores[kBlockKeys] = {};
    alignas(64) float each[kBlockKeys];
    for (; from < to; from += kBlockKeys) {
      const auto count = std::min<std::ptrdiff_t>(kBlockKeys, to - from);
      for (std::ptrdiff_t i = 0; i < count; ++i) scores[i] = from[i].score;
      store16(each, weights(scores));
      for (std::ptrdiff_t i = 0; i < count; ++i) lanes_[lane_of(from[i].position)] -= each[i];
    }
  }

  // They are not, after all, and have these scores.
  void put_back(std::span<const Found> found) {
    alignas(64) float each[kBlockKeys] = {};
    for (size_t i = 0; i < found.size(); i += kBlockKeys) {
      const size_t count = std::min<size_t>(kBlockKeys, found.size() - i);
      for (size_t lane = 0; lane < count; ++lane) {
        const double exponent =
            scale_ * (found[i + lane].score - form_->offset) - scale_ * form_->unit * origin_;
        each[lane] = static_cast<float>(std::min(exponent * kLog2E, kHeadroom));
      }
      store16(each, exp2_roughly16(load16(each)));
      for (size_t lane = 0; lane < count; ++lane) lanes_[lane_of(found[i + lane].id)] += each[lane];
    }
  }

  // Of the mean blocks whose keys are all in [begin, end), or the last one of `num_keys`: others
  // hold values of keys that do not count.
  void take(int64_t begin, int64_t end, int64_t num_keys, Unread& unread) const {
    unread.origin = form_->offset + form_->unit * origin_;
    unread.weights.resize(lanes_.size() / kBlockKeys);
    for (size_t m = 0; m < unread.weights.size(); ++m) {
      const int64_t first = static_cast<int64_t>(m) * kMeanKeys;
      const bool is_whole = first >= begin && std::min(first + kMeanKeys, num_keys) <= end;
      unread.weights[m] =
          is_whole ? std::max(0.f, sum_of16(load16(lanes_.data() + m * kBlockKeys))) : 0.f;
    }
  }

 private:
  // weights stay below 2^40 times that of the origin, and their sums finite
  static constexpr double kHeadroom = 40;

  static int64_t lane_of(int64_t position) {
    return position / kMeanKeys * kBlockKeys + position % kBlockKeys;
  }

  int32_t to_code(double score) const {
    return static_cast<int32_t>(std::clamp((score - form_->offset) / form_->unit, -1e9, 1e9));
  }

  void set_origin(int32_t origin) {
    origin_ = origin;
    const double reach = rate_ > 0 ? kHeadroom / rate_ : 1e9;
    ceiling_ = static_cast<int32_t>(std::min(origin + std::min(reach, 1e9), 1e9));
  }

  void move_origin(int32_t origin) {
    const auto factor =
        static_cast<float>(std::exp2(rate_ * (static_cast<double>(origin_) - origin)));
    for (float& each : lanes_) each *= factor;
    set_origin(origin);
  }

  RELAY_INLINE Vec16 weights(const int32_t* scores) const {
    return exp2_roughly16(distances16(scores, origin_) * set16(rate_in_float_));
  }

  RELAY_INLINE void add_to(int64_t mean_block, Vec16 sum) {
    float* const lanes = lanes_.data() + mean_block * kBlockKeys;
    store16(lanes, load16(lanes) + sum);
  }

  const QueryCode* form_ = nullptr;
  double scale_ = 0, rate_ = 0;
  float rate_in_float_ = 0;
  int32_t origin_ = 0, ceiling_ = 0;
  AlignedVector<float> lanes_;
};

}  // namespace
}  // namespace relay::index

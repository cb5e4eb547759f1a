// SPDX-License-Identifier: Apache-2.0
// How much attention weight a selection leaves out, at most, from the codes of all keys
// (docs/key-index.md, section 2).
#pragma once

#include <climits>

#include "aligned_vector.h"
#include "code_blocks.h"
#include "query_code.h"
#include "rescore.h"

namespace relay::index {
namespace {

// The code scores of all keys that were not scored exactly.
class Remainder {
 public:
  static constexpr int32_t kNone = INT_MIN;

  void reset(int64_t num_positions) {
    scores_.assign((num_positions + kBlockKeys - 1) / kBlockKeys * kBlockKeys, kNone);
  }

  void add(const int32_t* scores, int64_t block, uint32_t valid) {
    int32_t* to = scores_.data() + block * kBlockKeys;
    for (int lane = 0; lane < kBlockKeys; ++lane)
      to[lane] = valid >> lane & 1 ? scores[lane] : kNone;
  }

  void remove(int64_t position) { scores_[position] = kNone; }

  // Sum of e^(rate * (score - origin)).
  double weight(double origin, double rate) const {
    constexpr size_t kSum = 4096;  // a float sum of this many loses little
    const Vec16 factor = set16(static_cast<float>(rate * kLog2E));
    double total = 0;
    alignas(64) float exponents[kLanes];
    for (size_t at = 0; at < scores_.size();) {
      Vec16 sum = zero16();
      for (const size_t end = std::min(scores_.size(), at + kSum); at < end; at += kLanes) {
        for (int lane = 0; lane < kLanes; ++lane)
          exponents[lane] = scores_[at + lane] == kNone
                                ? -INFINITY
                                : static_cast<float>(scores_[at + lane] - origin);
        const Vec16 t = load16(exponents) * factor;
        if (all_at_most16(t, -64.f))  // each is counted as the largest of its kind
          sum = sum + set16(0x1p-64f);
        else
          sum = sum + exp2_16(t);
      }
      total += sum_of16(sum);
    }
    return total;
  }

  // Moves the positions of all scores above `bound` to `out`.
  void take_above(int32_t bound, std::vector<int32_t>& out) {
    for (size_t i = 0; i < scores_.size(); ++i)
      if (scores_[i] > bound) {
        out.push_back(static_cast<int32_t>(i));
        scores_[i] = kNone;
      }
  }

  int32_t best() const {
    return scores_.empty() ? kNone : *std::max_element(scores_.begin(), scores_.end());
  }

 private:
  std::vector<int32_t> scores_;
};

// Reduces `found`, exact scores of some keys, to what the request asks for, and adds from the
// others until what is left out is at most `request.max_dropped_mass` of the attention weight.
// Returns an upper bound of what is. `always` are the keys without a code.
inline float bound_dropped_mass(const SearchRequest& request, int query, const Rows& keys,
                                std::span<const int32_t> always, const QueryCode& form,
                                Remainder& remainder, std::vector<Found>& found,
                                int64_t& rescored) {
  const float* vector = request.queries + static_cast<int64_t>(query) * keys.size;
  std::vector<Found> all = found;
  std::sort(all.begin(), all.end(), better);
  keep_answers(request, query, found);
  size_t kept = found.size();  // `found` is the beginning of `all`
  // everything within a factor of e of the best that was not scored exactly
  const auto read_more = [&] {
    std::vector<int32_t> more;
    const double step = 1 / std::max(double{request.scale} * form.unit, 1e-30);
    remainder.take_above(static_cast<int32_t>(std::max(remainder.best() - step - 1, -2e9)), more);
    rescored += more.size();
    score_exactly(vector, keys, more, all);
    std::sort(all.begin(), all.end(), better);
  };
  // what is read besides may put all keys out of range
  if (all.empty() && remainder.best() != Remainder::kNone) read_more();
  if (all.empty()) return 0.f;
  // of the float arithmetic in here, and of the exact scores
  const double float_error = std::max(form.float_error, largest_rounding(vector, keys, always));
  const double rounding = (1 + 1e-4) * std::exp(double{request.scale} * float_error);
  const double rate = double{request.scale} * form.unit;
  const double error = std::exp(double{request.scale} * form.largest_error);
  for (;;) {
    const double top = all[0].score;
    double seen = 0, left = 0;
    std::vector<double> after(all.size() + 1, 0.0);
    for (size_t i = all.size(); i-- > 0;)
      after[i] = after[i + 1] + std::exp(request.scale * (all[i].score - top));
    const int32_t best = remainder.best();
    double unread = 0;
    if (best != Remainder::kNone)
      unread = rounding * error * remainder.weight((top - form.offset) / form.unit, rate);
    const auto bound = [&](size_t keep) {
      left = rounding * after[keep] + unread;
      seen = (after[0] - after[keep]) / rounding;
      return left > 0 ? static_cast<float>(std::min(1.0, left / (left + seen))) : 0.f;
    };
    if (request.max_dropped_mass < 1) {
      size_t low = kept, high = all.size();
      while (low < high) {  // the fewest that do
        const size_t middle = (low + high) / 2;
        if (bound(middle) <= request.max_dropped_mass)
          high = middle;
        else
          low = middle + 1;
      }
      kept = low;
    }
    const float reached = bound(kept);
    if (reached <= request.max_dropped_mass || best == Remainder::kNone) {
      found.assign(all.begin(), all.begin() + kept);
      return reached;
    }
    read_more();
  }
}

}  // namespace
}  // namespace relay::index

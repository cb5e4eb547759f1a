// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <bit>
#include <climits>
#include <cstdint>
#include <vector>

namespace relay::index {
namespace {

struct Candidate {
  int32_t position, score;
};

// an object, not a function: calls through it are inlined into algorithms
inline constexpr auto better_candidate = [](const Candidate& a, const Candidate& b) {
  return a.score > b.score || (a.score == b.score && a.position < b.position);
};

// What a scan has found for one query: everything above a bound, which rises as more is found.
class CandidateList {
 public:
  // Keeps what may be among the `keep` best if scores are off by up to half of `margin`.
  void reset_best(int32_t keep, int32_t margin, int32_t bound = INT_MIN) {
    reset(bound);
    keep_ = keep;
    margin_ = margin;
    grow(2 * keep + std::min(1024, 8 * keep));
  }

  // Keeps what is above `bound` and may be within `reach` of the best.
  void reset_range(int32_t reach, int32_t bound) {
    reset(bound);
    keep_ = 0;
    margin_ = reach;
    grow(4096);
  }

  // Scores at or below this are not wanted.
  int32_t bound() const { return bound_; }
  // Of all that were pushed: INT_MIN if none was.
  int32_t best() const { return best_; }
  Candidate* begin() { return items_.data(); }
  Candidate* end() { return items_.data() + count_; }
  const Candidate* begin() const { return items_.data(); }
  const Candidate* end() const { return items_.data() + count_; }
  int32_t count() const { return count_; }

  void push(int32_t position, int32_t score) {
    items_[count_++] = {position, score};
    if (score > best_) {
      best_ = score;
      if (!keep_) raise_to_best();
    }
    if (count_ == capacity_) {
      shrink();
      if (count_ > capacity_ / 2) grow(2 * capacity_);
    }
  }

  // Drops what the bound has overtaken; with `keep_best`, all but the best `keep`.
  void shrink(bool keep_best = false) {
    if (keep_) {
      if (count_ <= keep_) return;
      std::nth_element(begin(), begin() + keep_ - 1, end(), better_candidate);
      const int64_t last = items_[keep_ - 1].score;
      if (keep_best || margin_ == 0) {
        count_ = keep_;
        bound_ = static_cast<int32_t>(last);
        return;
      }
      bound_ = static_cast<int32_t>(std::max<int64_t>(bound_, last - margin_ - 1));
    }
    int32_t kept = 0;
    for (int32_t i = 0; i < count_; ++i) {  // no branch that depends on scores
      items_[kept] = items_[i];
      kept += items_[i].score > bound_;
    }
    count_ = kept;
  }

 private:
  void reset(int32_t bound) {
    bound_ = bound;
    best_ = INT_MIN;
    count_ = 0;
  }
  void grow(int32_t capacity) {
    capacity_ = capacity;
    if (static_cast<int32_t>(items_.size()) < capacity) items_.resize(capacity);
  }
  void raise_to_best() {
    bound_ = static_cast<int32_t>(std::max<int64_t>(bound_, int64_t{best_} - margin_ - 1));
  }

  std::vector<Candidate> items_;
  int32_t keep_ = 0, margin_ = 0, capacity_ = 0, count_ = 0, bound_ = INT_MIN, best_ = INT_MIN;
};

// Offers the scores of `Blocks` neighbouring blocks, at most four; those at `valid` lanes count.
template <int Blocks>
RELAY_INLINE void offer(CandidateList& list, const int32_t* scores, int64_t first_position,
                        uint64_t valid) {
  uint64_t left = 0;
  for (int b = 0; b < Blocks; ++b)
    left |= uint64_t{above(scores + b * kRowsAtOnce, list.bound())} << b * kRowsAtOnce;
  for (left &= valid; left; left &= left - 1) {
    const int lane = std::countr_zero(left);
    list.push(static_cast<int32_t>(first_position + lane), scores[lane]);
  }
}

// The lanes, of up to 64, that lie before the end.
inline uint64_t first_lanes(int64_t num_keys) {
  return num_keys >= 64 ? ~uint64_t{0} : (uint64_t{1} << num_keys) - 1;
}

}  // namespace
}  // namespace relay::index

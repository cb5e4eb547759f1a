// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>
#include <span>
#include <vector>

namespace relay::index {
namespace {

// The nodes a search has scored well, in buckets of equal width: pushing and popping cost the same
// however many there are, and the order inside a bucket does not matter to a search. The best
// `width` nodes are popped, once there are `keep`, and nodes that are not among the best `keep` are
// forgotten: each of the two floors rises as soon as that many nodes lie above it, but never past
// the end of the range, where there is one.
class ScoreQueue {
 public:
  struct Entry {
    int32_t id, score, next;
  };

  // Scores from `low` to `low + span` get a bucket of their own kind; others join the outer ones.
  void reset(int32_t low, int32_t span, int32_t width, int32_t keep, int64_t range, int32_t begin) {
    low_ = low;
    begin_ = begin;
    shift_ = 0;
    while ((span >> shift_) >= kBuckets) ++shift_;
    kept_ = {std::max(width, keep)};
    popped_ = {width};
    range_ = range;
    best_ = kNone;
    bound_ = INT_MIN;
    last_floor_ = range < 0 ? kBuckets - 1 : 0;
    std::fill(std::begin(buckets_), std::end(buckets_), Bucket{});
    top_ = 0;
    size_ = 0;
  }

  // Scores at or below this are not wanted.
  int32_t bound() const { return bound_; }
  // Scores at or below this are out of range.
  int64_t below_range() const { return range_ < 0 || best_ == kNone ? kNone : best_ - range_ - 1; }
  // A score with at least `wanted` of those that count above it, or none where there are fewer.
  int32_t bound_of_best(int32_t wanted) const {
    int32_t b = kBuckets - 1;
    for (int32_t above = buckets_[b].count; above < wanted && b > 0;) above += buckets_[--b].count;
    return b > 0 ? low_ + (b << shift_) - 1 : INT_MIN;
  }
  std::span<const Entry> entries() const { return {entries_.data(), static_cast<size_t>(size_)}; }

  // Makes room for `more` entries.
  void reserve(size_t more) {
    if (entries_.size() < size_ + more) entries_.resize(2 * (size_ + more));
  }

  // A score that counts for the range but is no node.
  void raise_best(int64_t score) {
    best_ = std::max(best_, score);
    raise_floor();
  }

  // There must be room. The floor stays where it is until `raise_floor`.
  void push(const int32_t* ids, const int32_t* scores, int32_t count) {
    const int32_t kept_floor = kept_.floor, popped_floor = popped_.floor;
    int32_t kept = 0, popped = 0, best = INT_MIN, top = top_;
    Entry* const out = entries_.data() + size_;
    for (int32_t i = 0; i < count; ++i) {
      const int32_t score = scores[i], b = bucket(score);
      Bucket& in = buckets_[b];
      out[i] = {ids[i], score, in.last};
      in.last = size_ + i;
      top = std::max(top, b);
      const int32_t counts = ids[i] >= begin_;
      in.count += counts;
      kept += counts & (b >= kept_floor);
      popped += counts & (b >= popped_floor);
      best = std::max(best, counts ? score : INT_MIN);
    }
    size_ += count;
    top_ = top;
    kept_.above += kept;
    popped_.above += popped;
    if (best > INT_MIN) best_ = std::max<int64_t>(best_, best);
  }

  void raise_floor() {
    if (range_ >= 0)
      last_floor_ = bucket(static_cast<int32_t>(
          std::clamp<int64_t>(below_range() + 1, low_, low_ + (int64_t{kBuckets} << shift_))));
    if (kept_.above >= kept_.wanted) raise(popped_);
    if (raise(kept_)) bound_ = low_ + (kept_.floor << shift_) - 1;
  }

  // The id of one of the best nodes not yet popped; -1: none above the floor.
  int32_t pop() {
    while (buckets_[top_].last < 0 && top_ > popped_.floor) --top_;
    int32_t& last = buckets_[top_].last;
    if (last < 0 || top_ < popped_.floor) return -1;
    const Entry& entry = entries_[last];
    last = entry.next;
    return entry.id;
  }

 private:
  static constexpr int kBuckets = 1024;
  static constexpr int64_t kNone = INT64_MIN / 2;

  struct Bucket {
    int32_t last = -1;  // of the entries that wait
    int32_t count = 0;  // of all that ever came, and count
  };
  struct Best {
    int32_t wanted = 0, floor = 0, above = 0;
  };

  bool raise(Best& best) {
    const int32_t before = best.floor;
    while (best.floor < last_floor_ && best.above - buckets_[best.floor].count >= best.wanted)
      best.above -= buckets_[best.floor++].count;
    return best.floor > before;
  }

  int32_t bucket(int32_t score) const {
    return std::min(static_cast<int32_t>(std::max<int64_t>(int64_t{score} - low_, 0) >> shift_),
                    kBuckets - 1);
  }

  int32_t low_ = 0, begin_ = 0, bound_ = INT_MIN;
  int64_t range_ = -1, best_ = kNone;
  int shift_ = 0, last_floor_ = 0;
  int32_t top_ = 0;  // no entry waits in a bucket above
  Best kept_, popped_;
  Bucket buckets_[kBuckets];
  int32_t size_ = 0;
  std::vector<Entry> entries_;
};

}  // namespace
}  // namespace relay::index

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <bit>
#include <climits>
#include <cstdint>
#include <cstring>
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
    std::memset(count_, 0, sizeof count_);
    std::memset(waiting_, 0, sizeof waiting_);
    size_ = 0;
  }

  // Scores at or below this are not wanted.
  int32_t bound() const { return bound_; }
  // Scores at or below this are out of range.
  int64_t below_range() const { return range_ < 0 || best_ == kNone ? kNone : best_ - range_ - 1; }
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
  void push(int32_t id, int32_t score) {
    const int b = bucket(score);
    const uint64_t bit = uint64_t{1} << (b % 64);
    uint64_t& word = waiting_[b / 64];
    entries_[size_] = {id, score, word & bit ? head_[b] : -1};
    head_[b] = size_++;
    word |= bit;
    if (id < begin_) return;
    ++count_[b];
    kept_.above += b >= kept_.floor;
    popped_.above += b >= popped_.floor;
    best_ = std::max<int64_t>(best_, score);
  }

  void raise_floor() {
    if (range_ >= 0) last_floor_ = bucket(below_range() + 1);
    if (kept_.above >= kept_.wanted) raise(popped_);
    if (raise(kept_)) bound_ = low_ + (kept_.floor << shift_) - 1;
  }

  // The id of one of the best nodes not yet popped; -1: none above the floor.
  int32_t pop() {
    for (int word = kBuckets / 64 - 1; word >= popped_.floor / 64; --word) {
      if (!waiting_[word]) continue;
      const int b = 64 * word + 63 - std::countl_zero(waiting_[word]);
      if (b < popped_.floor) return -1;
      const Entry& entry = entries_[head_[b]];
      head_[b] = entry.next;
      if (entry.next < 0) waiting_[word] &= ~(uint64_t{1} << (b % 64));
      return entry.id;
    }
    return -1;
  }

 private:
  static constexpr int kBuckets = 1024;
  static constexpr int64_t kNone = INT64_MIN / 2;

  struct Best {
    int32_t wanted = 0, floor = 0, above = 0;
  };

  bool raise(Best& best) {
    const int32_t before = best.floor;
    while (best.floor < last_floor_ && best.above - count_[best.floor] >= best.wanted)
      best.above -= count_[best.floor++];
    return best.floor > before;
  }

  int bucket(int64_t score) const {
    return static_cast<int>(
        std::min<int64_t>(std::max<int64_t>(score - low_, 0) >> shift_, kBuckets - 1));
  }

  int32_t low_ = 0, begin_ = 0, bound_ = INT_MIN;
  int64_t range_ = -1, best_ = kNone;
  int shift_ = 0, last_floor_ = 0;
  Best kept_, popped_;
  int32_t head_[kBuckets];
  int32_t count_[kBuckets];
  uint64_t waiting_[kBuckets / 64];
  int32_t size_ = 0;
  std::vector<Entry> entries_;
};

}  // namespace
}  // namespace relay::index

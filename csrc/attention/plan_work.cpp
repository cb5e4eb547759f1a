// SPDX-License-Identifier: Apache-2.0
#include "plan_work.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

namespace relay {
namespace {

// Query heads of query tokens whose states, one a segment, wait in memory to be merged.
constexpr int64_t kMaxPartialRows = 1 << 18;
// Scores of divided segments, of all kv heads, that wait in memory to be weighed.
constexpr int64_t kMaxScores = 1 << 25;
// Items that would end after this times a thread's share are those that are divided.
constexpr double kOnTime = 1.02;

constexpr double kNever = std::numeric_limits<double>::infinity();

// Threads that take items in turn, each the next one when it is done.
class Threads {
 public:
  explicit Threads(int count) : busy_until_(count, 0.0) {}

  double next_free() const { return busy_until_.front(); }
  double last_free() const { return *std::max_element(busy_until_.begin(), busy_until_.end()); }
  void take(double ns) {
    std::pop_heap(busy_until_.begin(), busy_until_.end(), std::greater<>());
    busy_until_.back() += ns;
    std::push_heap(busy_until_.begin(), busy_until_.end(), std::greater<>());
  }

 private:
  std::vector<double> busy_until_;
};

// Rows of one kind of item and what each costs.
template <class Row>
struct Costed {
  std::vector<Row> rows;
  std::vector<double> ns;

  void add(const Row& row, double row_ns) {
    rows.push_back(row);
    ns.push_back(row_ns);
  }

  void sort() {  // the most expensive first
    std::vector<int> order(rows.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return ns[a] > ns[b]; });
    Costed sorted;
    for (const int i : order) sorted.add(rows[i], ns[i]);
    *this = std::move(sorted);
  }
};

class Planner {
 public:
  explicit Planner(const WorkToPlan& work) : work_(work) {
    for (int b = 0; b < work.num_row_blocks; ++b) {
      const RowBlock& block = work.row_blocks[b];
      int visible = 1;
      for (int e = block.first_entry; e < block.last_entry; ++e)
        visible = std::max(visible, work.entries[e].visible);
      first_segment_.push_back(int(segment_ns_.size()));
      for (int begin = 0; begin < visible; begin += kSegmentTokens)
        segment_ns_.push_back(ns_of(block, begin, begin + kSegmentTokens));
      block_ns_.push_back(
          std::accumulate(segment_ns_.begin() + first_segment_.back(), segment_ns_.end(), 0.0));
      by_cost_.push_back(b);
    }
    first_segment_.push_back(int(segment_ns_.size()));
    std::stable_sort(by_cost_.begin(), by_cost_.end(),
                     [&](int a, int b) { return block_ns_[a] > block_ns_[b]; });
  }

  WorkList plan() {
    std::vector<double> largest(work_.num_row_blocks, kNever), divided(segment_ns_.size(), kNever);
    if (work_.num_threads == 1) return cut(largest, divided).list;
    std::fill(largest.begin(), largest.end(), work_.largest_ns);
    const Cut whole = cut(largest, divided);
    WorkList best = whole.list;
    for (const double due : {kOnTime, kOnTime / 2}) {
      if (best.makespan_ns <= work_.good_ns) break;
      divide_late(whole, due * work_.share_ns, largest, best);
    }
    return best;
  }

 private:
  struct Cut {
    WorkList list;
    std::vector<double> item_ns;  // of list.items
  };

  int num_segments(int block) const { return first_segment_[block + 1] - first_segment_[block]; }
  int num_entries(int block) const {
    return work_.row_blocks[block].last_entry - work_.row_blocks[block].first_entry;
  }

  // Calls f(cost, tokens, whether it begins there) for what tokens [begin, end) have of the spans.
  template <class F>
  void for_each_span(const RowBlock& block, int begin, int end, F f) const {
    for (int s = block.first_span; s < block.last_span; ++s) {
      const Span& span = work_.spans[s];
      const int tokens = std::min(span.end_token, end) - std::max(span.begin_token, begin);
      if (tokens > 0) f(work_.span_costs[s], tokens, span.begin_token >= begin);
    }
  }

  double ns_of(const RowBlock& block, int begin, int end) const {
    double ns = 0;
    for_each_span(block, begin, end, [&](const SpanCost& cost, int tokens, bool starts) {
      ns += cost.token * tokens + (starts ? cost.start : 0);
    });
    return ns;
  }

  // Divides what of `whole` would end after `due_ns`, in several numbers of parts; keeps the best.
  void divide_late(const Cut& whole, double due_ns, const std::vector<double>& largest,
                   WorkList& best) const {
    std::vector<bool> is_late(segment_ns_.size());
    std::vector<int> blocks;  // with late items of several segments
    double late_ns = 0;
    Threads threads(work_.num_threads);
    for (size_t i = 0; i < whole.list.items.size(); ++i) {
      bool late = false;
      for (int head = 0; head < work_.num_kv_heads; ++head) {
        late |= threads.next_free() + whole.item_ns[i] > due_ns;
        if (!late) threads.take(whole.item_ns[i]);
      }
      if (!late) continue;
      const WorkItem& item = whole.list.items[i];
      late_ns += whole.item_ns[i] * work_.num_kv_heads / work_.num_threads;
      for (int s = item.first_segment; s < item.last_segment; ++s)
        is_late[first_segment_[item.row_block] + s] = true;
      if (item.last_segment - item.first_segment > 1) blocks.push_back(item.row_block);
    }
    for (const int parts : {1, 2, 3, 4, 6, 8}) {
      if (late_ns == 0) break;
      std::vector<double> finer = largest, divided(segment_ns_.size(), kNever);
      for (const int block : blocks) finer[block] = std::min(finer[block], late_ns / parts);
      for (size_t s = 0; s < divided.size(); ++s)
        if (is_late[s]) divided[s] = late_ns / parts;
      Cut other = cut(finer, divided);
      if (other.list.makespan_ns < best.makespan_ns) best = std::move(other.list);
    }
  }

  // Items of whole segments, none of a block above `largest` if segments allow it; segments above
  // `divided` are divided into parts of about that. As far as there is memory.
  Cut cut(const std::vector<double>& largest, const std::vector<double>& divided) const {
    const int64_t heads = int64_t{work_.group_size} * work_.num_kv_heads;
    Costed<WorkItem> items;
    Costed<Merge> merges;
    Costed<ScoreItem> scores;
    Costed<WeightItem> weights;
    Costed<ValueItem> values;
    WorkList list;
    for (const int b : by_cost_) {
      const double* ns = &segment_ns_[first_segment_[b]];
      const double* part_ns = &divided[first_segment_[b]];
      const int count = num_segments(b), entries = num_entries(b);
      const int64_t states = int64_t{entries} * count;
      const int64_t row_scores = states * kSegmentTokens * work_.group_size;
      const bool has_room = (list.num_partial_entries + states) * heads <= kMaxPartialRows;
      const bool may_divide = work_.may_divide && has_room &&
                              (list.num_scores + row_scores) * work_.num_kv_heads <= kMaxScores;
      const double wanted = has_room ? std::ceil(block_ns_[b] / std::max(largest[b], 1.0)) : 1;
      const double parts = std::clamp(wanted, 1.0, double(count));
      std::vector<int> ends;  // of runs of segments; those that are divided are runs of their own
      std::vector<bool> is_divided;
      double before = 0, last_part = 0;
      for (int s = 0; s < count; ++s) {
        const bool divides = may_divide && ns[s] > part_ns[s];
        const double part = std::floor((before + ns[s] / 2) / std::max(block_ns_[b], 1e-9) * parts);
        if (s == 0 || divides || is_divided.back() || part > last_part) {
          ends.push_back(s);
          is_divided.push_back(divides);
        }
        ends.back() = s + 1;
        last_part = part;
        before += ns[s];
      }
      const bool has_divisions =
          std::find(is_divided.begin(), is_divided.end(), true) != is_divided.end();
      const bool is_split = ends.size() > 1 || has_divisions;
      const int state = is_split ? list.num_partial_entries : -1;
      for (size_t run = 0, first = 0; run < ends.size(); first = ends[run++]) {
        const int partial = is_split ? state + int(first) * entries : -1;
        if (is_divided[run]) {
          divide(b, int(first), partial, part_ns[first], list, scores, weights, values);
        } else {
          const double item_ns = std::accumulate(ns + first, ns + ends[run], 0.0);
          items.add({b, int(first), ends[run], partial}, item_ns);
        }
      }
      if (!is_split) continue;
      list.num_partial_entries += int(states);
      merges.add({b, state, count, has_divisions}, states * work_.group_size * work_.merge_ns);
    }
    items.sort();
    merges.sort();
    scores.sort();
    weights.sort();
    values.sort();
    list.makespan_ns = busy_ns(items.ns, work_.heads_first, scores.ns) + busy_ns(weights.ns) +
                       busy_ns(values.ns) + busy_ns(merges.ns);
    list.items = std::move(items.rows);
    list.score_items = std::move(scores.rows);
    list.weight_items = std::move(weights.rows);
    list.value_items = std::move(values.rows);
    list.merges = std::move(merges.rows);
    return {std::move(list), std::move(items.ns)};
  }

  void divide(int b, int segment, int partial, double part_ns, WorkList& list,
              Costed<ScoreItem>& scores, Costed<WeightItem>& weights,
              Costed<ValueItem>& values) const {
    const RowBlock& block = work_.row_blocks[b];
    const int begin = segment * kSegmentTokens, end = begin + kSegmentTokens;
    const int rows = num_entries(b) * work_.group_size;
    double starts_ns = 0, product_ns = 0, weights_ns = 0;
    int tokens = 0;
    for (int s = block.first_span; s < block.last_span; ++s)
      tokens = std::max(tokens, std::min(work_.spans[s].end_token, end) - begin);
    for_each_span(block, begin, end, [&](const SpanCost& cost, int count, bool starts) {
      starts_ns += starts ? cost.start / 2 : 0;
      product_ns += cost.product * count;
      weights_ns += cost.weight * count;
    });
    const int tiles = (tokens + kTileTokens - 1) / kTileTokens;
    const double total_ns = starts_ns + product_ns;
    const auto parts_of = [&](int most) {
      return std::clamp(int(std::lround(std::min(total_ns / part_ns, 1e6))), 1, most);
    };
    const int division = int(list.divisions.size());
    list.divisions.push_back({b, segment, partial, list.num_scores, tiles * kTileTokens});
    list.num_scores += rows * tiles * kTileTokens;

    const int score_parts = parts_of(tiles);
    double before = 0, item_ns = 0, last_part = 0;
    for (int tile = 0, first = 0; tile < tiles; ++tile) {
      double ns = 0;
      for_each_span(block, begin + tile * kTileTokens, begin + (tile + 1) * kTileTokens,
                    [&](const SpanCost& cost, int count, bool starts) {
                      ns += cost.product * count + (starts ? cost.start / 2 : 0);
                    });
      const double part = std::floor((before + ns / 2) / total_ns * score_parts);
      if (tile > first && part > last_part) {
        scores.add({division, begin + first * kTileTokens, begin + tile * kTileTokens}, item_ns);
        first = tile;
        item_ns = 0;
      }
      last_part = part;
      before += ns;
      item_ns += ns;
      if (tile + 1 == tiles)
        scores.add({division, begin + first * kTileTokens, begin + tiles * kTileTokens}, item_ns);
    }
    for (int part = 0, parts = parts_of(rows); part < parts; ++part)
      weights.add({division, part * rows / parts, (part + 1) * rows / parts}, weights_ns / parts);
    const int groups = work_.dim_groups;
    for (int part = 0, parts = parts_of(groups); part < parts; ++part) {
      const int first = part * groups / parts, last = (part + 1) * groups / parts;
      values.add({division, first, last}, starts_ns + product_ns * (last - first) / groups);
    }
  }

  // What the threads need for items, each for every kv head, and then for more. What is small fills
  // up what the rest leaves.
  double busy_ns(const std::vector<double>& costs, bool heads_first = false,
                 const std::vector<double>& then = {}) const {
    const int heads = work_.num_kv_heads;
    const double total = (std::accumulate(costs.begin(), costs.end(), 0.0) +
                          std::accumulate(then.begin(), then.end(), 0.0)) *
                         heads;
    const double share = total / work_.num_threads, small = share / 32;
    Threads threads(work_.num_threads);
    const auto take = [&](const std::vector<double>& each, int times, int rounds) {
      for (int round = 0; round < rounds; ++round)
        for (const double ns : each)
          for (int i = 0; i < times && ns > small; ++i) threads.take(ns);
    };
    take(costs, heads_first ? 1 : heads, heads_first ? heads : 1);
    take(then, heads, 1);
    return std::max(threads.last_free(), share);
  }

  const WorkToPlan& work_;
  std::vector<int> first_segment_;  // of each row block, and the end of the last
  std::vector<double> segment_ns_, block_ns_;
  std::vector<int> by_cost_;  // row blocks, the most expensive first
};

}  // namespace

WorkList plan_work(const WorkToPlan& work) { return Planner(work).plan(); }

}  // namespace relay

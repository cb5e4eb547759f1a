// SPDX-License-Identifier: Apache-2.0
// Best-first search of a graph over 8-bit codes, for one query or for all queries of a group at
// once: a node is looked up, fetched and marked once for all of them, and each query keeps a queue
// of its own.
#pragma once

#include <cmath>
#include <memory>

#include "code_lanes.h"
#include "query_code.h"
#include "score_queue.h"

namespace relay::index {
namespace {

constexpr int kMaxGroup = 16;
constexpr int kSamples = 128;  // keys whose scores tell where those of all keys lie
// Searches look at the first and the last keys of the prefix, unless a window of the caller has the
// first: heads with a sink want these, a token that follows its prefix wants the last ones, which
// no training query stood next to.
constexpr int kFirstKeys = 4, kLastKeys = 16;

struct SearchCounts {
  int64_t distances = 0, hops = 0;
};

// Neighbours that passed the bound of a query. They are queued before they are many, so that the
// bound rises within a batch.
struct Passed {
  static constexpr int kMany = 64;
  int32_t ids[kMany + kRowsAtOnce], scores[kMany + kRowsAtOnce];
  int count = 0;
};

// What one thread needs to search; sized by the largest index it met.
struct SearchScratch {
  std::vector<uint8_t> seen, expanded;  // `mark`: in this search
  uint8_t mark = 0;
  std::unique_ptr<ScoreQueue[]> queues{new ScoreQueue[kMaxGroup]};
  std::vector<int8_t> query_codes, quads;
  std::vector<int32_t> chosen, scores;
  std::vector<int32_t> batch;  // never shrinks: GraphSearch knows how many count
  Passed passed[kMaxGroup];

  void begin(int64_t num_rows) {
    const auto size = static_cast<size_t>(num_rows);
    if (++mark == 0 || seen.size() < size) {
      seen.assign(std::max(seen.size(), size), 0);
      expanded.assign(seen.size(), 0);
      mark = 1;
    }
  }
};

struct GraphQuery {
  const float* queries;  // [num_queries, size], `query_stride` apart
  int64_t query_stride;
  int32_t num_queries;
  int32_t width;            // nodes whose neighbours are looked at
  int32_t keep;             // nodes to find, where that is more
  float range;              // below 0: none
  const float* window_max;  // [num_queries] or null
  int32_t begin, prefix_len;
  const int32_t* entries;
  int32_t num_entries;
};

template <int Chunks>
class GraphSearch {
 public:
  GraphSearch(const Codes& codes, const Graph& graph, SearchScratch& scratch)
      : codes_(codes), graph_(graph), scratch_(scratch) {}

  // Afterwards `queue(i)` holds what query i found.
  void run(const GraphQuery& query) {
    group_ = query.num_queries;
    prefix_len_ = query.prefix_len;
    counts_ = {};
    scratch_.begin(codes_.num_rows);
    for (int i = 0; i < group_; ++i)
      scratch_.passed[i].count = 0;  // the search before may have thrown
    encode(query);
    seed(query);
    const int per_query = group_ == 1 ? 8 : 2;
    for (;;) {
      // nodes are chosen before the last batch is scored, so that their rows arrive meanwhile
      choose(per_query);
      score_batch();
      if (scratch_.chosen.empty()) {
        choose(per_query);
        if (scratch_.chosen.empty()) break;
      }
      collect();
    }
  }

  const ScoreQueue& queue(int i) const { return scratch_.queues[i]; }
  const SearchCounts& counts() const { return counts_; }

 private:
  const uint8_t* row(int32_t id) const {
    return codes_.data + static_cast<int64_t>(id) * codes_.stride;
  }
  const int32_t* neighbours(int32_t id) const {
    return graph_.rows + static_cast<int64_t>(id) * graph_.stride;
  }
  // Of a row that is whole and whose edges lead to keys. Slots that are not used hold old edges.
  const int32_t* verified_neighbours(int32_t id) const {
    verify_row(graph_.guard, id);
    const int32_t* const list = neighbours(id);
    uint32_t largest = 0;
    for (int32_t i = 1; i < graph_.stride; ++i)
      largest = std::max(largest, static_cast<uint32_t>(list[i]));
    if (static_cast<uint32_t>(list[0]) >= static_cast<uint32_t>(graph_.stride) ||
        largest >= codes_.num_rows) [[unlikely]]
      throw_damaged_row("edges of a graph that lead to none of its keys", id);
    return list;
  }
  void verify_batch(size_t begin, size_t end) const {
    if (codes_.guard)
      for (size_t i = begin; i < end; ++i)
        codes_.guard->verify(static_cast<size_t>(scratch_.batch[i]));
  }

  void encode(const GraphQuery& query) {
    const int stride = codes_.stride, quads = (group_ + kQuad - 1) / kQuad;
    scratch_.query_codes.assign(static_cast<size_t>(quads) * kQuad * stride, 0);
    int8_t* const all = scratch_.query_codes.data();
    for (int i = 0; i < group_; ++i)
      query_[i] = encode_query(query.queries + i * query.query_stride, codes_, all + i * stride);
    if (group_ == 1) return;
    scratch_.quads.resize(static_cast<size_t>(quads) * kQuad * stride);
    for (int quad = 0; quad < quads; ++quad) {
      const int8_t* four[kQuad];
      for (int q = 0; q < kQuad; ++q) four[q] = all + (quad * kQuad + q) * stride;
      interleave_quad(four, stride, scratch_.quads.data() + quad * kQuad * stride);
    }
  }

  bool mark_seen(int32_t id) {
    const bool fresh = scratch_.seen[id] != scratch_.mark;
    scratch_.seen[id] = scratch_.mark;
    return fresh;
  }

  // Scores the entries, the ends and keys from all over the context; lays the queues out by them.
  void seed(const GraphQuery& query) {
    make_room(kSamples + query.num_entries + kFirstKeys + kLastKeys);
    const int64_t n = prefix_len_;
    for (int64_t i = 0; i < kSamples; ++i) {
      const auto id =
          static_cast<int32_t>((i * n + (i * 40503 % kSamples) * n / kSamples) / kSamples);
      if (id < n) add_unseen(id);
    }
    const auto num_samples = static_cast<int>(size_);
    const auto add = [&](int64_t id) {
      if (id >= 0 && id < n) add_unseen(static_cast<int32_t>(id));
    };
    for (int i = 0; i < query.num_entries; ++i) add(query.entries[i]);
    for (int i = 0; i < kFirstKeys && query.begin == 0; ++i) add(i);
    for (int i = 1; i <= kLastKeys; ++i) add(n - i);
    const auto num_seeds = static_cast<int>(size_);
    const std::vector<int32_t>& batch = scratch_.batch;
    counts_.distances += num_seeds;
    const int padded = (num_seeds + kRowsAtOnce - 1) / kRowsAtOnce * kRowsAtOnce;
    auto& scores = scratch_.scores;
    scores.resize(static_cast<size_t>(group_ + kQuad) * padded);
    pad_batch();
    for (int i = 0; i < num_seeds; ++i) prefetch_row(row(batch[i]), Chunks);
    verify_batch(0, num_seeds);
    for (int at = 0; at < padded; at += kRowsAtOnce) {
      const uint8_t* rows[kRowsAtOnce];
      for (int r = 0; r < kRowsAtOnce; ++r) rows[r] = row(batch[at + r]);
      for (int i = 0; i < group_; ++i)
        dot_rows<Chunks>(rows, scratch_.query_codes.data() + i * codes_.stride,
                         scores.data() + static_cast<size_t>(i) * padded + at);
    }
    for (int i = 0; i < group_; ++i) {
      const int32_t* mine = scores.data() + static_cast<size_t>(i) * padded;
      int64_t sum = 0, squares = 0;
      for (int s = 0; s < num_samples; ++s) {
        sum += mine[s];
        squares += int64_t{mine[s]} * mine[s];
      }
      const double mean = static_cast<double>(sum) / num_samples;
      const double deviation =
          std::sqrt(std::max(0.0, static_cast<double>(squares) / num_samples - mean * mean));
      int64_t range = -1;
      if (query.range >= 0)
        range = static_cast<int64_t>(std::min(
            1e15, std::ceil((query.range + kRangeErrors * query_[i].error) / query_[i].unit)));
      scratch_.queues[i].reset(static_cast<int32_t>(mean - deviation),
                               static_cast<int32_t>(11 * deviation) + 1, query.width, query.keep,
                               range, query.begin);
      if (query.window_max && query.window_max[i] > -INFINITY)
        scratch_.queues[i].raise_best(static_cast<int64_t>(
            std::clamp((query.window_max[i] - query_[i].offset) / query_[i].unit, -1e15, 1e15)));
      scratch_.queues[i].reserve(num_seeds);
      scratch_.queues[i].push(batch.data(), mine, num_seeds);
      scratch_.queues[i].raise_floor();
    }
    size_ = 0;
  }

  void choose(int per_query) {
    auto& chosen = scratch_.chosen;
    chosen.clear();
    for (int i = 0; i < group_; ++i)
      for (int taken = 0; taken < per_query;) {
        const int32_t id = scratch_.queues[i].pop();
        if (id < 0) break;
        if (group_ > 1) {
          uint8_t& expanded = scratch_.expanded[id];
          if (expanded == scratch_.mark) continue;  // another query chose it
          expanded = scratch_.mark;
        }
        chosen.push_back(id);
        for (int at = 0; at < graph_.stride; at += 16) __builtin_prefetch(neighbours(id) + at);
        ++taken;
      }
  }

  void collect() {
    make_room(scratch_.chosen.size() * (graph_.stride - 1));
    int32_t* const batch = scratch_.batch.data();
    counts_.hops += scratch_.chosen.size();
    const bool filtered = prefix_len_ < codes_.num_rows;
    for (const int32_t node : scratch_.chosen) {
      const int32_t* list = verified_neighbours(node);
      if (!filtered) {
        const size_t begin = size_;
        int32_t* out = batch + begin;
        const uint8_t mark = scratch_.mark;
        uint8_t* const seen = scratch_.seen.data();
        for (int i = 1; i <= list[0]; ++i) {
          const int32_t id = list[i];
          const uint8_t before = seen[id];
          *out = id;
          out += before != mark;
          seen[id] = mark;
        }
        size_ = out - batch;
        for (size_t i = begin; i < size_; ++i) prefetch_row_far(row(batch[i]), Chunks);
      } else {
        collect_filtered(list);
      }
    }
    pad_batch();
    for (size_t i = 0; i < std::min<size_t>(size_, kAhead); ++i)
      prefetch_row(row(batch[i]), Chunks);
  }

  // Neighbours outside the prefix are not scored; their own neighbours stand in for them.
  void collect_filtered(const int32_t* list) {
    int missing = 0;
    for (int i = 1; i <= list[0]; ++i) {
      if (list[i] >= prefix_len_)
        ++missing;
      else
        add_unseen(list[i]);
    }
    for (int i = 1; i <= list[0] && missing > 0; ++i) {
      if (list[i] < prefix_len_ || !mark_seen(list[i])) continue;
      const int32_t* second = verified_neighbours(list[i]);
      for (int j = 1; j <= second[0] && missing > 0; ++j)
        if (second[j] < prefix_len_ && add_unseen(second[j])) --missing;
    }
  }

  void make_room(size_t ids) {
    if (scratch_.batch.size() < ids + kRowsAtOnce) scratch_.batch.resize(ids + kRowsAtOnce);
  }

  bool add_unseen(int32_t id) {
    const bool fresh = mark_seen(id);
    if (fresh) scratch_.batch[size_++] = id;
    return fresh;
  }

  // Repeats the last id up to a whole number of rows that are scored at once.
  void pad_batch() {
    for (size_t i = size_; i % kRowsAtOnce; ++i) scratch_.batch[i] = scratch_.batch[size_ - 1];
  }

  void score_batch() {
    const int32_t* const batch = scratch_.batch.data();
    counts_.distances += size_;
    for (size_t at = 0; at < size_; at += kRowsAtOnce) {
      const uint8_t* rows[kRowsAtOnce];
      for (int r = 0; r < kRowsAtOnce; ++r) rows[r] = row(batch[at + r]);
      verify_batch(at, at + kRowsAtOnce);
      for (size_t i = at + kAhead; i < std::min(at + kAhead + kRowsAtOnce, size_); ++i)
        prefetch_row(row(batch[i]), Chunks);
      const uint32_t valid = size_ - at >= kRowsAtOnce ? 0xffffu : (1u << (size_ - at)) - 1;
      for (int first = 0; first < group_; first += kQuad) {
        alignas(64) int32_t scores[kQuad][kRowsAtOnce];
        const int in_quad = std::min(kQuad, group_ - first);
        if (group_ == 1)
          dot_rows<Chunks>(rows, scratch_.query_codes.data(), scores[0]);
        else
          dot_rows_quad<Chunks>(rows, scratch_.quads.data() + first * codes_.stride, scores);
        for (int q = 0; q < in_quad; ++q) {
          const int i = first + q;
          const uint32_t mask = above(scores[q], scratch_.queues[i].bound()) & valid;
          Passed& passed = scratch_.passed[i];
          passed.count += append(mask, batch + at, scores[q], passed.ids + passed.count,
                                 passed.scores + passed.count);
          if (passed.count >= Passed::kMany) queue_passed(i);
        }
      }
    }
    if (size_)
      for (int i = 0; i < group_; ++i) queue_passed(i);
    size_ = 0;
  }

  // Puts what passed the bound of query i into its queue.
  void queue_passed(int i) {
    Passed& passed = scratch_.passed[i];
    ScoreQueue& queue = scratch_.queues[i];
    queue.reserve(passed.count);
    queue.push(passed.ids, passed.scores, passed.count);
    queue.raise_floor();
    passed.count = 0;
  }

  static constexpr size_t kAhead = 32;  // rows fetched before they are scored

  const Codes& codes_;
  const Graph& graph_;
  SearchScratch& scratch_;
  QueryCode query_[kMaxGroup];
  SearchCounts counts_;
  int32_t group_ = 1, prefix_len_ = 0;
  size_t size_ = 0;  // ids in the batch, without those that pad it
};

}  // namespace
}  // namespace relay::index

// SPDX-License-Identifier: Apache-2.0
// Carries out a plan with a kernel: loads queries, folds spans in token order, restarts at segment
// boundaries, repairs rows that overflowed, merges and normalises.
#pragma once

#include <algorithm>
#include <new>
#include <span>
#include <type_traits>

#include "../common/aligned_buffer.h"
#include "../common/flush_subnormals.h"
#include "kv_row.h"
#include "problem.h"
#include "refold.h"
#include "row_state.h"
#include "weights.h"

namespace relay {
namespace {

template <class T, class Kernel>
class Driver {
 public:
  Driver(const Problem& problem, const Plan& plan)
      : problem_(problem),
        plan_(plan),
        group_size_(problem.num_heads / problem.num_kv_heads),
        dim_groups_(problem.head_size / kLanes),
        scale_{problem.scale * kLog2E, problem.scale, problem.logits_soft_cap} {}

  void run() {
    static thread_local AlignedBuffer partial_buffer;  // of the caller, read by its team
    const int64_t partial_rows =
        int64_t{plan_.num_partial_entries} * group_size_ * problem_.num_kv_heads;
    float* partial = static_cast<float*>(
        partial_buffer.reserve(partial_rows * (problem_.head_size + kLanes + 1) * sizeof(float)));
    partial_ = {partial, problem_.head_size, kLanes, partial + partial_rows * problem_.head_size,
                partial + partial_rows * (problem_.head_size + kLanes)};
    static thread_local AlignedBuffer score_buffer;
    scores_ = static_cast<float*>(score_buffer.reserve(
        int64_t{plan_.num_scores} * problem_.num_kv_heads * int64_t{sizeof(float)}));
    // of items, score items, weight items, value items and merges, those of all heads
    int64_t taken[5] = {},
            counts[5] = {plan_.num_items, plan_.num_score_items, plan_.num_weight_items,
                         plan_.num_value_items, plan_.num_merges};
    for (int64_t& count : counts) count *= problem_.num_kv_heads;
#pragma omp parallel num_threads(plan_.num_threads) if (plan_.num_threads > 1)
    {
      const FlushSubnormals flush;
      Kernel::enter_thread();
      Scratch scratch{};
      bool ready = true;
      try {
        scratch = allocate_scratch();
      } catch (const std::bad_alloc&) {  // must not leave the region; other threads take the work
        ready = false;
      }
      // Calls f(item, kv head, scratch) for those that no other thread has taken.
      const auto take = [&](int kind, const auto* items, bool heads_first, auto f) {
        const int64_t heads = problem_.num_kv_heads, count = counts[kind], of_head = count / heads;
        for (int64_t i;
             ready && (i = __atomic_fetch_add(&taken[kind], 1, __ATOMIC_RELAXED)) < count;)
          (this->*f)(items[heads_first ? i % of_head : i / heads],
                     int(heads_first ? i / of_head : i % heads), scratch);
      };
      // Head after head: requests that read the same blocks apart find one head's in the cache.
      take(0, plan_.items, plan_.heads_first, &Driver::run_item);
      if (plan_.num_score_items > 0) {
        take(1, plan_.score_items, false, &Driver::run_scores);
#pragma omp barrier
        take(2, plan_.weight_items, false, &Driver::run_weights);
#pragma omp barrier
        take(3, plan_.value_items, false, &Driver::run_values);
      }
      if (plan_.num_merges > 0) {
#pragma omp barrier
        take(4, plan_.merges, plan_.heads_first, &Driver::run_merge);
      }
      Kernel::leave_thread();
    }
    for (int kind = 0; kind < 5; ++kind)
      if (taken[kind] < counts[kind]) throw std::bad_alloc();
  }

 private:
  struct Scratch {  // one thread's memory
    void* operands;
    RowRange* ranges;
    RowRange* clipped;  // `ranges`, as far as they lie in a span
    RowStates total, part;
    int max_rows;
  };

  Scratch allocate_scratch() const {
    static thread_local AlignedBuffer buffer;
    const int rows = Kernel::padded_rows(plan_.max_block_entries * group_size_);
    const int64_t operand_bytes = Kernel::operand_bytes(rows, problem_.head_size);
    const int64_t output_floats = int64_t{rows} * problem_.head_size;
    const int64_t state_floats = output_floats + int64_t{rows} * (kLanes + 1);
    const int64_t range_bytes = (int64_t{rows} * int64_t{sizeof(RowRange)} + 63) / 64 * 64;
    const int64_t state_bytes = (state_floats * int64_t{sizeof(float)} + 63) / 64 * 64;
    char* memory =
        static_cast<char*>(buffer.reserve(operand_bytes + 2 * range_bytes + 2 * state_bytes));
    Scratch scratch;
    scratch.max_rows = rows;
    scratch.operands = memory;
    scratch.ranges = reinterpret_cast<RowRange*>(memory + operand_bytes);
    scratch.clipped = reinterpret_cast<RowRange*>(memory + operand_bytes + range_bytes);
    const auto states = [&](char* at) {
      float* outputs = reinterpret_cast<float*>(at);
      float* sums = outputs + output_floats;
      return Kernel::layout(outputs, sums, sums + int64_t{rows} * kLanes, rows, problem_.head_size);
    };
    scratch.total = states(memory + operand_bytes + 2 * range_bytes);
    scratch.part = states(memory + operand_bytes + 2 * range_bytes + state_bytes);
    return scratch;
  }

  int num_rows(const RowBlock& block) const {
    return (block.last_entry - block.first_entry) * group_size_;
  }

  void run_item(const WorkItem& item, int kv_head, const Scratch& scratch) {
    const RowBlock& block = plan_.row_blocks[item.row_block];
    Kernel kernel(problem_, scratch.operands, scratch.max_rows);
    load_rows(block, kv_head, kernel, scratch);
    const int rows = num_rows(block);
    const bool whole = item.partial_entry < 0;
    for (int segment = item.first_segment; segment < item.last_segment; ++segment) {
      const bool first = segment == item.first_segment;
      const RowStates& states = first ? scratch.total : scratch.part;
      for (int row = 0; row < rows; ++row) clear_row(states, row, dim_groups_);
      fold_segment(block, kv_head, segment, kernel, scratch, states);
      const int64_t partial =
          partial_row(block, item.partial_entry, segment - item.first_segment, kv_head);
      for (int row = 0; row < rows; ++row) {
        if (!whole)
          copy_row(states, row, partial_, partial + row, dim_groups_);
        else if (!first)
          merge_row(scratch.total, row, scratch.part, row, dim_groups_);
      }
    }
    if (whole)
      for (int row = 0; row < rows; ++row) finish_row(block, kv_head, row, scratch.total, row);
  }

  Stored stored_of(const Division& division, int kv_head) const {
    return {scores_ + int64_t{kv_head} * plan_.num_scores + division.first_score,
            division.row_scores, division.segment * kSegmentTokens};
  }

  void run_scores(const ScoreItem& item, int kv_head, const Scratch& scratch) const {
    const Division& division = plan_.divisions[item.division];
    const RowBlock& block = plan_.row_blocks[division.row_block];
    Kernel kernel(problem_, scratch.operands, scratch.max_rows);
    load_rows(block, kv_head, kernel, scratch);
    const int begin = item.begin_token, end = item.end_token;
    for_each_span(block, kv_head, begin, end, end, [&](const Part& part) {
      kernel.store_scores(scratch.total, scratch.ranges, part.first_row, part.last_row, part.kv,
                          part.first_tile, part.kv.end_token, stored_of(division, kv_head));
    });
  }

  // What a row does not see of a span weighs nothing: rows beside it may.
  void run_weights(const WeightItem& item, int kv_head, const Scratch& scratch) const {
    const Division& division = plan_.divisions[item.division];
    const RowBlock& block = plan_.row_blocks[division.row_block];
    const Stored stored = stored_of(division, kv_head);
    const int64_t partial = partial_row(block, division.partial_entry, 0, kv_head);
    load_ranges(block, kv_head, scratch);
    for (int row = item.first_row; row < item.last_row; ++row)
      clear_row(partial_, partial + row, dim_groups_);
    const RowStates states = {nullptr, 0, 0, partial_.sums + partial * kLanes,
                              partial_.references + partial};  // by row of the block
    for_each_span(block, kv_head, division.segment, [&](const Part& part) {
      const int first = std::max(item.first_row, part.first_row);
      const int last = std::min(item.last_row, part.last_row);
      for (int row = first; row < last; ++row)
        with_features([&](auto features) {
          Kernel::template store_weights<features()>(states, row, scratch.ranges[row],
                                                     part.first_tile, part.kv.end_token, scale_,
                                                     stored.at(row, part.first_tile));
        });
    });
  }

  void run_values(const ValueItem& item, int kv_head, const Scratch& scratch) const {
    const Division& division = plan_.divisions[item.division];
    const RowBlock& block = plan_.row_blocks[division.row_block];
    Kernel kernel(problem_, scratch.operands, scratch.max_rows);
    load_ranges(block, kv_head, scratch);
    const RowStates& states = scratch.total;
    for (int row = 0; row < num_rows(block); ++row) clear_row(states, row, dim_groups_);
    const DimGroups dims{item.first_group, item.last_group};
    for_each_span(block, kv_head, division.segment, [&](const Part& part) {
      kernel.fold_stored(states, scratch.ranges, part.first_row, part.last_row, part.kv,
                         part.first_tile, part.kv.end_token, stored_of(division, kv_head), dims);
    });
    const int64_t partial = partial_row(block, division.partial_entry, 0, kv_head);
    for (int row = 0; row < num_rows(block); ++row)
      for (int g = dims.first; g < dims.last; ++g)
        store16(partial_.output(partial + row, g), load16(states.output(row, g)));
  }

  // Merges in segment order, as an item with all segments does.
  void run_merge(const Merge& merge, int kv_head, const Scratch& scratch) {
    const RowBlock& block = plan_.row_blocks[merge.row_block];
    if (merge.has_divisions) repair(merge, kv_head, scratch);
    const int64_t total = partial_row(block, merge.partial_entry, 0, kv_head);
    for (int row = 0; row < num_rows(block); ++row) {
      for (int segment = 1; segment < merge.num_segments; ++segment)
        merge_row(partial_, total + row, partial_,
                  partial_row(block, merge.partial_entry, segment, kv_head) + row, dim_groups_);
      finish_row(block, kv_head, row, partial_, total + row);
    }
  }

  // Folds again what overflowed in divided segments, where no thread saw all of a row.
  void repair(const Merge& merge, int kv_head, const Scratch& scratch) {
    const RowBlock& block = plan_.row_blocks[merge.row_block];
    Kernel kernel(problem_, scratch.operands, scratch.max_rows);
    load_rows(block, kv_head, kernel, scratch);
    for (int segment = 0; segment < merge.num_segments; ++segment) {
      const int64_t partial = partial_row(block, merge.partial_entry, segment, kv_head);
      refold(block, kv_head, segment, kernel, scratch, partial_.from(partial));
    }
  }

  int64_t partial_row(const RowBlock& block, int entry, int segment, int kv_head) const {
    return (int64_t{kv_head} * plan_.num_partial_entries + entry) * group_size_ +
           int64_t{segment} * num_rows(block);
  }

  void load_rows(const RowBlock& block, int kv_head, Kernel& kernel, const Scratch& scratch) const {
    const T* query = static_cast<const T*>(problem_.query);
    int row = 0;
    for (int e = block.first_entry; e < block.last_entry; ++e)
      for (int g = 0; g < group_size_; ++g, ++row)
        kernel.load_query(row, query + plan_.entries[e].token * problem_.query_token_stride +
                                   (kv_head * group_size_ + g) * problem_.query_head_stride);
    load_ranges(block, kv_head, scratch);
  }

  void load_ranges(const RowBlock& block, int kv_head, const Scratch& scratch) const {
    int row = 0;
    for (int e = block.first_entry; e < block.last_entry; ++e) {
      const int visible = plan_.entries[e].visible;
      const int window = problem_.sliding_window;
      const int begin = window > 0 && visible > window ? visible - window : 0;
      for (int g = 0; g < group_size_; ++g, ++row) {
        const int head = kv_head * group_size_ + g;
        const float slope = problem_.alibi_slopes ? problem_.alibi_slopes[head] * kLog2E : 0.f;
        scratch.ranges[row] = {begin, visible, slope};
      }
    }
  }

  void fold_segment(const RowBlock& block, int kv_head, int segment, Kernel& kernel,
                    const Scratch& scratch, const RowStates& states) const {
    for_each_span(block, kv_head, segment, [&](const Part& part) {
      const RowRange* ranges = ranges_in(part, part.first_row, part.last_row, scratch);
      with_features([&](auto features) {
        kernel.template fold<features()>(states, ranges, part.first_row, part.last_row, part.kv,
                                         part.first_tile, part.kv.end_token, scale_);
      });
    });
    refold(block, kv_head, segment, kernel, scratch, states);
  }

  // Folds again the rows of a segment that overflowed.
  void refold(const RowBlock& block, int kv_head, int segment, Kernel& kernel,
              const Scratch& scratch, const RowStates& states) const {
    const auto refold_rows = [&](std::span<const int> rows, float largest_sum) {
      for_each_span(block, kv_head, segment, [&](const Part& part) {
        const auto first = std::lower_bound(rows.begin(), rows.end(), part.first_row);
        const auto last = std::lower_bound(first, rows.end(), part.last_row);
        if (first == last) return;
        const RowRange* ranges = ranges_in(part, *first, last[-1] + 1, scratch);
        with_features([&](auto features) {
          kernel.template refold<features()>(states, ranges, {first, last}, part.kv,
                                             part.first_tile, part.kv.end_token, scale_,
                                             largest_sum);
        });
      });
    };
    refold_overflowed<Kernel>(states, 0, num_rows(block), dim_groups_, refold_rows);
  }

  struct Part {  // what some tokens have of a span
    int first_row, last_row;
    KvRow kv;
    int first_tile;   // where reading begins: a multiple of kTileTokens
    int begin_token;  // no row sees tokens before it
  };

  // What rows [first_row, last_row) see of a part. Their own ranges say it, unless spans end where
  // hidden tokens begin.
  const RowRange* ranges_in(const Part& part, int first_row, int last_row,
                            const Scratch& scratch) const {
    if (!plan_.hides_tokens) return scratch.ranges;
    for (int row = first_row; row < last_row; ++row) {
      RowRange& range = scratch.clipped[row] = scratch.ranges[row];
      range.begin_token = std::max(range.begin_token, part.begin_token);
      range.end_token = std::min(range.end_token, part.kv.end_token);
    }
    return scratch.clipped;
  }

  // Calls f(part) for what a segment has of the spans, in token order for every row.
  template <class F>
  void for_each_span(const RowBlock& block, int kv_head, int segment, F f) const {
    const int begin = segment * kSegmentTokens, end = begin + kSegmentTokens;
    for_each_span(block, kv_head, begin, end, end + kSegmentTokens, f);
  }

  // The same for tokens [begin, end); those before `then_end` are read next.
  template <class F>
  void for_each_span(const RowBlock& block, int kv_head, int begin, int end, int then_end,
                     F f) const {
    Part parts[2];
    int known = 0;  // whether parts[0] waits for what is read after it
    for (int s = block.first_span; s < block.last_span; ++s) {
      if (!part_of(s, block, kv_head, begin, end, parts[known])) continue;
      if (known) {
        parts[0].kv.then = &parts[1].kv;
        parts[0].kv.then_begin = parts[1].first_tile;
        f(parts[0]);
        parts[0] = parts[1];
      }
      known = 1;
    }
    if (!known) return;
    for (int s = block.first_span; s < block.last_span && !parts[0].kv.then; ++s) {
      if (!part_of(s, block, kv_head, end, then_end, parts[1])) continue;
      parts[0].kv.then = &parts[1].kv;
      parts[0].kv.then_begin = parts[1].first_tile;
    }
    f(parts[0]);
  }

  bool part_of(int s, const RowBlock& block, int kv_head, int from, int to, Part& part) const {
    const Span& span = plan_.spans[s];
    const int begin = span.begin_token > from ? span.begin_token : from;
    const int end = span.end_token < to ? span.end_token : to;
    if (begin >= end) return false;
    constexpr int element_bytes = sizeof(typename Kernel::Element);
    part.first_row = (span.first_entry - block.first_entry) * group_size_;
    part.last_row = (span.last_entry - block.first_entry) * group_size_;
    part.kv = {static_cast<const char*>(problem_.kv_cache) +
                   kv_head * problem_.kv_head_stride * element_bytes,
               problem_.kv_block_stride * element_bytes,
               problem_.block_table + span.request * problem_.block_table_stride,
               problem_.block_size,
               problem_.head_size,
               element_bytes,
               end};
    part.first_tile = begin / kTileTokens * kTileTokens;
    part.begin_token = begin;
    return true;
  }

  void finish_row(const RowBlock& block, int kv_head, int row, const RowStates& states,
                  int64_t state_row) const {
    const int head = kv_head * group_size_ + row % group_size_;
    const int64_t token = plan_.entries[block.first_entry + row / group_size_].token;
    const float* sink = problem_.sinks ? problem_.sinks + head : nullptr;
    const Normaliser n = normaliser(states, state_row, sink);
    T* output = static_cast<T*>(problem_.output) + token * problem_.output_token_stride +
                head * problem_.output_head_stride;
    for (int g = 0; g < dim_groups_; ++g)
      store_elements16(output + g * kLanes, load16(states.output(state_row, g)) * set16(n.power) *
                                                set16(n.scale) * set16(problem_.v_scale));
    if (problem_.lse) problem_.lse[token * problem_.num_heads + head] = n.lse();
  }

  // Calls f(std::true_type) for scores with a soft cap or ALiBi.
  template <class F>
  void with_features(F f) const {
    if (problem_.logits_soft_cap != 0.f || problem_.alibi_slopes != nullptr)
      f(std::true_type{});
    else
      f(std::false_type{});
  }

  const Problem& problem_;
  const Plan& plan_;
  const int group_size_, dim_groups_;
  const ScoreScale scale_;
  RowStates partial_{};
  float* scores_ = nullptr;  // of divided segments
};

}  // namespace
}  // namespace relay

// SPDX-License-Identifier: Apache-2.0
// Carries out a plan with a kernel: loads queries, folds spans in token order, restarts at segment
// boundaries, repairs rows that overflowed, merges and normalises.
#pragma once

#include <algorithm>
#include <new>

#include "../common/aligned_buffer.h"
#include "kv_row.h"
#include "problem.h"
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
    int64_t next_item = 0, next_merge = 0;
    const int64_t items = int64_t{plan_.num_items} * problem_.num_kv_heads;
    const int64_t merges = int64_t{plan_.num_merges} * problem_.num_kv_heads;
#pragma omp parallel num_threads(plan_.num_threads) if (plan_.num_threads > 1)
    {
      Kernel::enter_thread();
      Scratch scratch{};
      bool ready = true;
      try {
        scratch = allocate_scratch();
      } catch (const std::bad_alloc&) {  // must not leave the region; other threads take the work
        ready = false;
      }
      const auto take = [](int64_t* next) { return __atomic_fetch_add(next, 1, __ATOMIC_RELAXED); };
      // Head after head: requests that read the same blocks apart find one head's in the cache.
      for (int64_t i; ready && (i = take(&next_item)) < items;)
        run_item(plan_.items[i % plan_.num_items], int(i / plan_.num_items), scratch);
      if (merges > 0) {
#pragma omp barrier
        for (int64_t i; (i = take(&next_merge)) < merges;)
          run_merge(plan_.merges[i % plan_.num_merges], int(i / plan_.num_merges));
      }
      Kernel::leave_thread();
    }
    if (next_item < items) throw std::bad_alloc();
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

  // Merges in segment order, as an item with all segments does.
  void run_merge(const Merge& merge, int kv_head) {
    const RowBlock& block = plan_.row_blocks[merge.row_block];
    const int64_t total = partial_row(block, merge.partial_entry, 0, kv_head);
    for (int row = 0; row < num_rows(block); ++row) {
      for (int segment = 1; segment < merge.num_segments; ++segment)
        merge_row(partial_, total + row, partial_,
                  partial_row(block, merge.partial_entry, segment, kv_head) + row, dim_groups_);
      finish_row(block, kv_head, row, partial_, total + row);
    }
  }

  int64_t partial_row(const RowBlock& block, int entry, int segment, int kv_head) const {
    return (int64_t{kv_head} * plan_.num_partial_entries + entry) * group_size_ +
           int64_t{segment} * num_rows(block);
  }

  void load_rows(const RowBlock& block, int kv_head, Kernel& kernel, const Scratch& scratch) const {
    const T* query = static_cast<const T*>(problem_.query);
    int row = 0;
    for (int e = block.first_entry; e < block.last_entry; ++e) {
      const Entry& entry = plan_.entries[e];
      const int window = problem_.sliding_window;
      const int begin = window > 0 && entry.visible > window ? entry.visible - window : 0;
      for (int g = 0; g < group_size_; ++g, ++row) {
        const int head = kv_head * group_size_ + g;
        kernel.load_query(row, query + entry.token * problem_.query_token_stride +
                                   head * problem_.query_head_stride);
        const float slope = problem_.alibi_slopes ? problem_.alibi_slopes[head] * kLog2E : 0.f;
        scratch.ranges[row] = {begin, entry.visible, slope};
      }
    }
  }

  void fold_segment(const RowBlock& block, int kv_head, int segment, Kernel& kernel,
                    const Scratch& scratch, const RowStates& states) const {
    for_each_span(block, kv_head, segment, [&](const Part& part) {
      const RowRange* ranges = ranges_in(part, part.first_row, part.last_row, scratch);
      if (has_features())
        kernel.template fold<true>(states, ranges, part.first_row, part.last_row, part.kv,
                                   part.first_tile, part.kv.end_token, scale_);
      else
        kernel.template fold<false>(states, ranges, part.first_row, part.last_row, part.kv,
                                    part.first_tile, part.kv.end_token, scale_);
    });
    for (int row = 0; row < num_rows(block); ++row)
      if (overflowed(states, row, dim_groups_))
        fold_again(block, kv_head, segment, kernel, scratch, states, row);
  }

  // Repeats one row of a segment with the reference that fits all of the segment.
  void fold_again(const RowBlock& block, int kv_head, int segment, Kernel& kernel,
                  const Scratch& scratch, const RowStates& states, int row) const {
    clear_row(states, row, dim_groups_);
    for_each_span(block, kv_head, segment, [&](const Part& part) {
      if (row < part.first_row || row >= part.last_row) return;
      const RowRange* ranges = ranges_in(part, row, row + 1, scratch);
      if (has_features())
        kernel.template raise_reference<true>(states, ranges, row, part.kv, part.first_tile,
                                              part.kv.end_token, scale_);
      else
        kernel.template raise_reference<false>(states, ranges, row, part.kv, part.first_tile,
                                               part.kv.end_token, scale_);
    });
    states.references[row] = finite_reference(states.references[row]);
    for_each_span(block, kv_head, segment, [&](const Part& part) {
      if (row < part.first_row || row >= part.last_row) return;
      const RowRange* ranges = ranges_in(part, row, row + 1, scratch);
      if (has_features())
        kernel.template fold<true>(states, ranges, row, row + 1, part.kv, part.first_tile,
                                   part.kv.end_token, scale_);
      else
        kernel.template fold<false>(states, ranges, row, row + 1, part.kv, part.first_tile,
                                    part.kv.end_token, scale_);
    });
  }

  struct Part {  // what a segment has of a span
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

  // Calls f(part) in token order for every row.
  template <class F>
  void for_each_span(const RowBlock& block, int kv_head, int segment, F f) const {
    Part parts[2];
    int known = 0;  // whether parts[0] waits for what is read after it
    for (int s = block.first_span; s < block.last_span; ++s) {
      if (!part_of(block, s, kv_head, segment, parts[known])) continue;
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
      if (!part_of(block, s, kv_head, segment + 1, parts[1])) continue;
      parts[0].kv.then = &parts[1].kv;
      parts[0].kv.then_begin = parts[1].first_tile;
    }
    f(parts[0]);
  }

  bool part_of(const RowBlock& block, int s, int kv_head, int segment, Part& part) const {
    const Span& span = plan_.spans[s];
    const int segment_begin = segment * kSegmentTokens;
    const int segment_end = segment_begin + kSegmentTokens;
    const int begin = span.begin_token > segment_begin ? span.begin_token : segment_begin;
    const int end = span.end_token < segment_end ? span.end_token : segment_end;
    if (begin >= end) return false;
    const int64_t element_bytes = sizeof(T);
    part.first_row = (span.first_entry - block.first_entry) * group_size_;
    part.last_row = (span.last_entry - block.first_entry) * group_size_;
    part.kv = {static_cast<const char*>(problem_.kv_cache) +
                   kv_head * problem_.kv_head_stride * element_bytes,
               problem_.kv_block_stride * element_bytes,
               problem_.block_table + span.request * problem_.block_table_stride,
               problem_.block_size,
               problem_.head_size,
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
      store_elements16(output + g * kLanes,
                       load16(states.output(state_row, g)) * set16(n.power) * set16(n.scale));
    if (problem_.lse) problem_.lse[token * problem_.num_heads + head] = n.lse;
  }

  bool has_features() const {
    return problem_.logits_soft_cap != 0.f || problem_.alibi_slopes != nullptr;
  }

  const Problem& problem_;
  const Plan& plan_;
  const int group_size_, dim_groups_;
  const ScoreScale scale_;
  RowStates partial_{};
};

}  // namespace
}  // namespace relay

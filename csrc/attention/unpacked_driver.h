// SPDX-License-Identifier: Apache-2.0
// Attention over keys and values that lie token after token: each segment is packed in a thread's
// cache and folded into all rows that read it. Results are those of driver.h over a KV cache with
// the same tokens, to the last bit.
#pragma once

#include <new>

#include "../common/aligned_buffer.h"
#include "../common/flush_subnormals.h"
#include "packed_segment.h"
#include "problem.h"
#include "refold.h"
#include "row_state.h"
#include "weights.h"

namespace relay {
namespace {

template <class T, class Kernel>
class UnpackedDriver {
 public:
  UnpackedDriver(const Problem& problem, const Unpacked& unpacked)
      : problem_(problem),
        unpacked_(unpacked),
        group_size_(problem.num_heads / problem.num_kv_heads),
        dim_groups_(problem.head_size / kLanes),
        scale_{problem.scale * kLog2E, problem.scale, 0.f} {}

  void run() {
    static thread_local AlignedBuffer kept_buffer;  // of the caller, read by its team
    if (unpacked_.splits_segments) {
      const int64_t rows =
          int64_t{unpacked_.num_segments} * unpacked_.num_rows * problem_.num_kv_heads;
      kept_ = states_in(kept_buffer.reserve(state_bytes(rows)), rows);
      for (int64_t row = 0; row < rows; ++row) kept_.references[row] = kUnset;
    }
    int64_t next_item = 0, next_block = 0;
    const int64_t items = int64_t{unpacked_.num_items} * problem_.num_kv_heads;
    const int64_t blocks =
        unpacked_.splits_segments ? int64_t{unpacked_.num_blocks} * problem_.num_kv_heads : 0;
#pragma omp parallel num_threads(unpacked_.num_threads) if (unpacked_.num_threads > 1)
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
      const auto take = [](int64_t* next) { return __atomic_fetch_add(next, 1, __ATOMIC_RELAXED); };
      for (int64_t i; ready && (i = take(&next_item)) < items;)
        run_item(unpacked_.items[i % unpacked_.num_items], int(i / unpacked_.num_items), scratch);
      if (blocks > 0) {
#pragma omp barrier
        for (int64_t i; (i = take(&next_block)) < blocks;)
          merge_segments(unpacked_.blocks[i % unpacked_.num_blocks], int(i / unpacked_.num_blocks));
      }
      Kernel::leave_thread();
    }
    if (next_item < items) throw std::bad_alloc();
  }

 private:
  struct Scratch {  // one thread's memory
    void* operands;
    RowRange* ranges;
    void* segment;
    RowStates total;  // of all rows of an item
    RowStates part;   // of one block
  };

  static int64_t whole_lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

  int64_t state_bytes(int64_t rows) const {
    return whole_lines(rows * (problem_.head_size + kLanes + 1) * int64_t{sizeof(float)});
  }

  RowStates states_in(void* memory, int64_t rows) const {  // row after row
    float* outputs = static_cast<float*>(memory);
    float* sums = outputs + rows * problem_.head_size;
    return {outputs, problem_.head_size, kLanes, sums, sums + rows * kLanes};
  }

  RowStates kernel_states_in(void* memory, int rows) const {
    float* outputs = static_cast<float*>(memory);
    float* sums = outputs + int64_t{rows} * problem_.head_size;
    return Kernel::layout(outputs, sums, sums + int64_t{rows} * kLanes, rows, problem_.head_size);
  }

  Scratch allocate_scratch() const {
    static thread_local AlignedBuffer buffer;
    int block_rows = 0;
    for (int b = 0; b < unpacked_.num_blocks; ++b)
      block_rows = block_rows < num_rows(b) ? num_rows(b) : block_rows;
    block_rows = Kernel::padded_rows(block_rows);
    const int rows = Kernel::padded_rows(unpacked_.max_item_rows);
    const int64_t operand_bytes = whole_lines(Kernel::operand_bytes(rows, problem_.head_size));
    const int64_t range_bytes = whole_lines(int64_t{rows} * int64_t{sizeof(RowRange)});
    const int64_t segment_bytes = PackedSegment<T>::bytes(problem_.head_size);
    char* at = static_cast<char*>(buffer.reserve(operand_bytes + range_bytes + segment_bytes +
                                                 state_bytes(rows) + state_bytes(block_rows)));
    const auto next = [&](int64_t bytes) {
      char* begin = at;
      at += bytes;
      return begin;
    };
    Scratch scratch;
    scratch.operands = next(operand_bytes);
    scratch.ranges = reinterpret_cast<RowRange*>(next(range_bytes));
    scratch.segment = next(segment_bytes);
    scratch.total = kernel_states_in(next(state_bytes(rows)), rows);
    scratch.part = kernel_states_in(next(state_bytes(block_rows)), block_rows);
    return scratch;
  }

  int num_rows(const UnpackedBlock& block) const {
    return (block.last_query - block.first_query) * group_size_;
  }
  int num_rows(int block) const { return num_rows(unpacked_.blocks[block]); }

  // Tokens before this one are what a query token of a request sees.
  static int visible_end(const UnpackedRequest& request, int query) {
    return request.is_causal ? request.end_token - request.num_queries + query + 1
                             : request.end_token;
  }

  void run_item(const UnpackedItem& item, int kv_head, const Scratch& scratch) {
    Kernel kernel(problem_, scratch.operands, Kernel::padded_rows(unpacked_.max_item_rows));
    PackedSegment<T> packed(unpacked_, problem_.num_kv_heads, problem_.head_size, scratch.segment);
    packed.forget();
    int rows = 0;
    for (int b = item.first_block; b < item.last_block; ++b) {
      load_rows(unpacked_.blocks[b], kv_head, kernel, scratch.ranges, rows);
      rows += num_rows(b);
    }
    for (int row = 0; row < rows; ++row) clear_row(scratch.total, row, dim_groups_);
    for (int segment = item.first_segment; segment < item.last_segment; ++segment) {
      int first_row = 0;
      for (int b = item.first_block; b < item.last_block; first_row += num_rows(b++))
        run_block(unpacked_.blocks[b], kv_head, segment, first_row, kernel, packed, scratch);
    }
    if (unpacked_.splits_segments) return;
    int first_row = 0;
    for (int b = item.first_block; b < item.last_block; first_row += num_rows(b++))
      for (int row = 0; row < num_rows(b); ++row)
        finish_row(unpacked_.blocks[b], kv_head, row, scratch.total, first_row + row);
  }

  void load_rows(const UnpackedBlock& block, int kv_head, Kernel& kernel, RowRange* ranges,
                 int row) const {
    const UnpackedRequest& request = unpacked_.requests[block.request];
    const T* query = static_cast<const T*>(problem_.query);
    for (int q = block.first_query; q < block.last_query; ++q)
      for (int g = 0; g < group_size_; ++g, ++row) {
        kernel.load_query(row, query + (request.first_query + q) * problem_.query_token_stride +
                                   (kv_head * group_size_ + g) * problem_.query_head_stride);
        ranges[row] = {request.begin_token, visible_end(request, q), 0.f};
      }
  }

  // Folds a segment into the rows of a block, the first of which is `first_row` of the item.
  void run_block(const UnpackedBlock& block, int kv_head, int segment, int first_row,
                 Kernel& kernel, PackedSegment<T>& packed, const Scratch& scratch) const {
    const UnpackedRequest& request = unpacked_.requests[block.request];
    const int segment_begin = segment * kSegmentTokens;
    const int segment_end = segment_begin + kSegmentTokens;
    const int last_visible = visible_end(request, block.last_query - 1);
    const int begin = request.begin_token > segment_begin ? request.begin_token : segment_begin;
    const int end = last_visible < segment_end ? last_visible : segment_end;
    if (begin >= end) return;
    packed.pack(block.request, segment, kv_head);
    const KvRow kv = packed.kv(end);
    const RowStates states = scratch.part.from(-first_row);  // by row of the item
    const int last_row = first_row + num_rows(block);
    const int tile = begin / kTileTokens * kTileTokens;
    for (int row = first_row; row < last_row; ++row) clear_row(states, row, dim_groups_);
    kernel.template fold<false>(states, scratch.ranges, first_row, last_row, kv, tile, end, scale_);
    refold_overflowed<Kernel>(states, first_row, last_row, dim_groups_,
                              [&](std::span<const int> rows, float largest_sum) {
                                kernel.template refold<false>(states, scratch.ranges, rows, kv,
                                                              tile, end, scale_, largest_sum);
                              });
    for (int row = first_row; row < last_row; ++row) {
      if (unpacked_.splits_segments)
        copy_row(states, row, kept_, kept_row(block, row - first_row, segment, kv_head),
                 dim_groups_);
      else
        merge_row(scratch.total, row, states, row, dim_groups_);
    }
  }

  int64_t kept_row(const UnpackedBlock& block, int row, int segment, int kv_head) const {
    return (int64_t{kv_head} * unpacked_.num_rows + block.first_row + row) *
               unpacked_.num_segments +
           segment;
  }

  // In segment order, as an item with all segments does.
  void merge_segments(const UnpackedBlock& block, int kv_head) const {
    for (int row = 0; row < num_rows(block); ++row) {
      const int64_t first = kept_row(block, row, 0, kv_head);
      for (int segment = 1; segment < unpacked_.num_segments; ++segment)
        merge_row(kept_, first, kept_, first + segment, dim_groups_);
      finish_row(block, kv_head, row, kept_, first);
    }
  }

  void finish_row(const UnpackedBlock& block, int kv_head, int row, const RowStates& states,
                  int64_t state_row) const {
    const int head = kv_head * group_size_ + row % group_size_;
    const int64_t token =
        unpacked_.requests[block.request].first_query + block.first_query + row / group_size_;
    const Normaliser n = normaliser(states, state_row, nullptr);
    const int64_t at = token * problem_.output_token_stride + head * problem_.output_head_stride;
    for (int g = 0; g < dim_groups_; ++g) {
      const Vec16 output = load16(states.output(state_row, g)) * set16(n.power) * set16(n.scale);
      if (unpacked_.float_output)
        store16(static_cast<float*>(problem_.output) + at + g * kLanes, output);
      else
        store_elements16(static_cast<T*>(problem_.output) + at + g * kLanes, output);
    }
    if (problem_.lse) problem_.lse[token * problem_.num_heads + head] = n.lse();
  }

  const Problem& problem_;
  const Unpacked& unpacked_;
  const int group_size_, dim_groups_;
  const ScoreScale scale_;
  RowStates kept_{};  // [kv_heads, rows, segments], if segments are split
};

}  // namespace
}  // namespace relay

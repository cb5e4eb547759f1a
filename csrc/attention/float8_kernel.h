// SPDX-License-Identifier: Apache-2.0
// A KV cache in float8 for a kernel that reads the type of the queries: what is read together with
// a chunk of tokens becomes that type, packed as it was, in a thread's cache, and the kernel goes
// on from there. Every float8 is such a number, so results are, to the last bit, those of a cache
// of that type with the same numbers.
#pragma once

#include <span>

#include "kv_row.h"
#include "problem.h"
#include "weights.h"
#include "widen_float8.h"

namespace relay {
namespace {

template <class T, class Kernel>
class Float8Kernel {
 public:
  using Element = Float8;  // of the KV cache
  static constexpr float kLargestSum = Kernel::kLargestSum;

  static int64_t operand_bytes(int rows, int head_size) {
    return chunk_bytes(head_size) + Kernel::operand_bytes(rows, head_size);
  }
  static RowStates layout(float* outputs, float* sums, float* references, int rows, int head_size) {
    return Kernel::layout(outputs, sums, references, rows, head_size);
  }
  static int padded_rows(int rows) { return Kernel::padded_rows(rows); }
  static void enter_thread() { Kernel::enter_thread(); }
  static void leave_thread() { Kernel::leave_thread(); }

  Float8Kernel(const Problem& problem, void* operands, int rows)
      : dim_groups_(problem.head_size / kLanes),
        chunk_(static_cast<T*>(operands)),
        kernel_(problem, static_cast<char*>(operands) + chunk_bytes(problem.head_size), rows) {}

  void load_query(int row, const void* query) { kernel_.load_query(row, query); }

  template <bool Features>
  void fold(const RowStates& states, const RowRange* ranges, int first_row, int last_row,
            const KvRow& kv, int begin, int end, const ScoreScale& scale) {
    for_each_chunk(kv, begin, end, true, {0, dim_groups_},
                   [&](const KvRow& chunk, int first, int last) {
                     kernel_.template fold<Features>(states, ranges, first_row, last_row, chunk,
                                                     first, last, scale);
                   });
  }

  template <bool Features>
  void refold(const RowStates& states, const RowRange* ranges, std::span<const int> rows,
              const KvRow& kv, int begin, int end, const ScoreScale& scale, float largest_sum) {
    for_each_chunk(kv, begin, end, true, {0, dim_groups_},
                   [&](const KvRow& chunk, int first, int last) {
                     kernel_.template refold<Features>(states, ranges, rows, chunk, first, last,
                                                       scale, largest_sum);
                   });
  }

  void store_scores(const RowStates& states, const RowRange* ranges, int first_row, int last_row,
                    const KvRow& kv, int begin, int end, const Stored& stored) {
    for_each_chunk(kv, begin, end, true, {}, [&](const KvRow& chunk, int first, int last) {
      kernel_.store_scores(states, ranges, first_row, last_row, chunk, first, last, stored);
    });
  }

  template <bool Features>
  static void store_weights(const RowStates& states, int row, const RowRange& range, int begin,
                            int end, const ScoreScale& scale, float* stored) {
    Kernel::template store_weights<Features>(states, row, range, begin, end, scale, stored);
  }

  void fold_stored(const RowStates& states, const RowRange* ranges, int first_row, int last_row,
                   const KvRow& kv, int begin, int end, const Stored& stored, DimGroups dims) {
    for_each_chunk(kv, begin, end, false, dims, [&](const KvRow& chunk, int first, int last) {
      kernel_.fold_stored(states, ranges, first_row, last_row, chunk, first, last, stored, dims);
    });
  }

 private:
  static constexpr int kTokens = Kernel::kFoldTokens;  // of a chunk

  static int64_t chunk_bytes(int head_size) {
    return 2 * int64_t{kTokens} * head_size * int64_t{sizeof(T)};
  }

  // Calls f(chunk, first, last) for tokens [begin, end), cut where chunks begin; `begin` is the
  // first of a tile.
  template <class F>
  void for_each_chunk(const KvRow& kv, int begin, int end, bool keys, DimGroups values, F f) {
    for (int first = begin; first < end;) {
      const int chunk_end = (first / kTokens + 1) * kTokens;
      const int last = chunk_end < end ? chunk_end : end;
      widen(kv, first, last, keys, values);
      KvRow chunk = {reinterpret_cast<const char*>(chunk_),
                     0,
                     nullptr,
                     kTokens,
                     kv.head_size,
                     int{sizeof(T)},
                     last,
                     &kv,
                     last};
      if (last == kv.end_token) {
        chunk.then = kv.then;
        chunk.then_begin = kv.then_begin;
      }
      f(chunk, first, last);
      first = last;
    }
  }

  // Keys of tokens [begin, end), or of whole tiles of them, and values of some dims.
  void widen(const KvRow& kv, int begin, int end, bool keys, DimGroups values) {
    const int head_size = kv.head_size;
    end = (end + kTileTokens - 1) / kTileTokens * kTileTokens;
    for (int token = begin; token < end;) {
      const int block_end = kv.block_end(token);
      const int run_end = block_end < end ? block_end : end;
      const int tokens = run_end - token, at = token % kTokens;
      const auto to_chunk = [&](const void* from, int dims, int64_t to) {
        widen_float8(static_cast<const Float8*>(from), tokens * dims, chunk_ + to);
      };
      if (keys) to_chunk(kv.key_group(token), head_size, int64_t{at} * head_size);
      for (int g = values.first; g < values.last; ++g)
        to_chunk(kv.value_line(token, g), kLanes,
                 int64_t{kTokens} * (head_size + g * kLanes) + int64_t{at} * kLanes);
      token = run_end;
    }
  }

  const int dim_groups_;
  T* chunk_;
  Kernel kernel_;
};

}  // namespace
}  // namespace relay

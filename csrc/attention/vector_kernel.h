// SPDX-License-Identifier: Apache-2.0
// Folds KV tokens into row states with vector registers: tiles of up to kMaxRows rows by 64 tokens.
#pragma once

#include <algorithm>
#include <span>
#include <type_traits>

#include "kv_row.h"
#include "multiply.h"
#include "problem.h"
#include "row_state.h"
#include "weights.h"

namespace relay {
namespace {

#if defined(__AVX512F__)
constexpr int kMaxRows = 6, kColumns = 4;  // 24 accumulators, 4 lines, operands
#elif defined(__AVX2__)
constexpr int kMaxRows = 4, kColumns = 1;  // 8 accumulators, 4 halves of a line, an operand
#elif defined(RELAY_NEON)
constexpr int kMaxRows = 6, kColumns = 1;  // 24 accumulators, 4 quarters of a line, an operand
#else
constexpr int kMaxRows = 2, kColumns = 2;
#endif
constexpr int kChunkTokens = 256;  // scores and weights of a row tile stay in the L1 cache
constexpr int kChunkGroups = kChunkTokens / kLanes;

template <class T>
class VectorKernel {
 public:
  using Element = T;  // of the KV cache
  using W = Operand<T>;
  static constexpr int kFoldTokens = kChunkTokens;
  static constexpr int kParts = OperandOf<T>::kWeightParts;
  static constexpr float kLargestSum = 0x1p60f;  // of a lane, before the reference is raised

  // Bytes of thread-private memory for the queries of `rows` rows.
  static int64_t operand_bytes(int rows, int head_size) {
    return (int64_t{rows} * head_size * int64_t{sizeof(W)} + 63) / 64 * 64;
  }
  static RowStates layout(float* outputs, float* sums, float* references, int /*rows*/,
                          int head_size) {
    return {outputs, head_size, kLanes, sums, references};
  }

  static int padded_rows(int rows) { return rows; }
  static void enter_thread() {}
  static void leave_thread() {}

  VectorKernel(const Problem& problem, void* operands, int /*rows*/)
      : problem_(problem), queries_(static_cast<W*>(operands)) {}

  void load_query(int row, const void* query) {
    const T* from = static_cast<const T*>(query);
    W* to = queries_ + int64_t{row} * problem_.head_size;
    if constexpr (std::is_same_v<T, W>)
      std::memcpy(to, from, problem_.head_size * sizeof(T));
    else
      for (int d = 0; d < problem_.head_size; ++d) to[d] = to_float(from[d]);
  }

  // Folds tokens [begin, end) of one block table row into rows [first_row, last_row).
  template <bool Features>
  void fold(const RowStates& states, const RowRange* ranges, int first_row, int last_row,
            const KvRow& kv, int begin, int end, const ScoreScale& scale) {
    visit<Features, Pass::kFold>(states, ranges, first_row, last_row, kv, begin, end,
                                 {.scale = scale, .largest_sum = kLargestSum});
  }

  // The same of some rows, in ascending order, and sums that are not to grow further than that.
  template <bool Features>
  void refold(const RowStates& states, const RowRange* ranges, std::span<const int> rows,
              const KvRow& kv, int begin, int end, const ScoreScale& scale, float largest_sum) {
    for (size_t i = 0; i < rows.size();) {
      const int first_row = rows[i];
      int last_row = first_row;
      while (i < rows.size() && rows[i] == last_row) ++i, ++last_row;
      visit<Features, Pass::kFold>(states, ranges, first_row, last_row, kv, begin, end,
                                   {.scale = scale, .largest_sum = largest_sum});
    }
  }

  // Stores the raw scores of tokens [begin, end).
  void store_scores(const RowStates& states, const RowRange* ranges, int first_row, int last_row,
                    const KvRow& kv, int begin, int end, const Stored& stored) {
    visit<false, Pass::kScores>(states, ranges, first_row, last_row, kv, begin, end,
                                {.stored = stored});
  }

  // Turns the stored scores of a row and tokens [begin, end) into weights, and folds them into its
  // reference and sums.
  template <bool Features>
  static void store_weights(const RowStates& states, int row, const RowRange& range, int begin,
                            int end, const ScoreScale& scale, float* stored) {
    float& reference = states.references[row];
    if (reference == kUnset)
      reference = first_reference<Features>(stored, begin, end, scale, range);
    compute_weights<Features, true, kParts>(stored, begin, (end - begin + kLanes - 1) / kLanes,
                                            scale, range, reference == kUnset ? 0.f : reference,
                                            stored, 0, states.sums + row * kLanes);
  }

  // As `fold`, of stored weights and for some of the dims; sums and references stay as they are.
  void fold_stored(const RowStates& states, const RowRange* ranges, int first_row, int last_row,
                   const KvRow& kv, int begin, int end, const Stored& stored, DimGroups groups) {
    visit<false, Pass::kValues>(states, ranges, first_row, last_row, kv, begin, end,
                                {.stored = stored, .dims = groups});
  }

 private:
  // Elements of a tile of weights from one part, or one row, to the next.
  static constexpr int64_t kPartStride = kChunkTokens, kRowStride = kParts * kChunkTokens;

  struct Options {  // what passes need, each some of it
    ScoreScale scale{};
    float largest_sum = 0.f;
    Stored stored{};
    DimGroups dims{};
  };

  template <bool Features, Pass What>
  void visit(const RowStates& states, const RowRange* ranges, int first_row, int last_row,
             const KvRow& kv, int begin, int end, const Options& options) {
    const int rows = last_row - first_row;
    const int tiles = (rows + kMaxRows - 1) / kMaxRows;
    for (int chunk = begin; chunk < end; chunk += kChunkTokens) {
      const int chunk_end = chunk + kChunkTokens < end ? chunk + kChunkTokens : end;
      if constexpr (What != Pass::kValues)
        prefetch_ = BlockPrefetch(kv, chunk_end, kChunkTokens, What == Pass::kScores);
      int row = first_row;
      for (int tile = 0; tile < tiles; ++tile) {
        const int size = rows / tiles + (tile < rows % tiles);  // tiles differ by one row at most
        dispatch_rows<Features, What>(size, states, ranges, row, kv, chunk, chunk_end, options);
        row += size;
      }
    }
  }

  template <bool Features, Pass What, int Rows = kMaxRows>
  void dispatch_rows(int rows, const RowStates& states, const RowRange* ranges, int row,
                     const KvRow& kv, int begin, int end, const Options& options) {
    if (rows == Rows)
      visit_tile<Features, What, Rows>(states, ranges, row, kv, begin, end, options);
    else if constexpr (Rows > 1)
      dispatch_rows<Features, What, Rows - 1>(rows, states, ranges, row, kv, begin, end, options);
  }

  template <bool Features, Pass What, int Rows>
  __attribute__((noinline)) void visit_tile(const RowStates& states, const RowRange* ranges,
                                            int first_row, const KvRow& kv, int chunk,
                                            int chunk_end, const Options& options) {
    // the union of what the rows see
    int begin = chunk_end, end = chunk;
    for (int r = 0; r < Rows; ++r) {
      const RowRange& range = ranges[first_row + r];
      begin = range.begin_token < begin ? range.begin_token : begin;
      end = range.end_token > end ? range.end_token : end;
    }
    begin = begin > chunk ? begin : chunk;
    end = end < chunk_end ? end : chunk_end;
    if (begin >= end) return;
    const int first_token = begin / kLanes * kLanes;
    const int groups = groups_of(begin, end);
    if constexpr (What == Pass::kScores) {
      multiply_keys<Rows>(first_row, kv, first_token, groups,
                          options.stored.at(first_row, first_token), options.stored.row_size);
    } else if constexpr (What == Pass::kValues) {
      alignas(64) W weights[Rows * kRowStride];
      for (int r = 0; r < Rows; ++r) {
        const float* from = options.stored.at(first_row + r, first_token);
        for (int g = 0; g < groups; ++g)
          relay::store_weights(weights + r * kRowStride + g * kLanes, kPartStride,
                               load16(from + g * kLanes));
      }
      multiply_values<Rows>(states, first_row, kv, begin, end, options.dims, weights);
    } else {
      alignas(64) float scores[Rows * kChunkTokens];
      multiply_keys<Rows>(first_row, kv, first_token, groups, scores, kChunkTokens);
      alignas(64) W weights[Rows * kRowStride];
      Vec16 sums_before[Rows];
      bool within_range = true;
      for (int r = 0; r < Rows; ++r) {
        float* sums = states.sums + (first_row + r) * kLanes;
        sums_before[r] = load16(sums);
        weigh<Features>(states, first_row + r, ranges[first_row + r], first_token, groups,
                        options.scale, scores + r * kChunkTokens, weights + r * kRowStride);
        within_range &= all_at_most16(load16(sums), options.largest_sum);
      }
      if (within_range) {
        multiply_values<Rows>(states, first_row, kv, begin, end, {0, problem_.head_size / kLanes},
                              weights);
      } else {
        for (int r = 0; r < Rows; ++r)
          store16(states.sums + (first_row + r) * kLanes, sums_before[r]);
        fold_growing<Features, Rows>(states, ranges, first_row, kv, begin, end, options, scores,
                                     weights);
      }
    }
  }

  // Tile after tile of a chunk, as a reference is raised at the first token of a tile.
  template <bool Features, int Rows>
  __attribute__((noinline)) void fold_growing(const RowStates& states, const RowRange* ranges,
                                              int first_row, const KvRow& kv, int begin, int end,
                                              const Options& options, const float* scores,
                                              W* weights) {
    const int dim_groups = problem_.head_size / kLanes;
    const int first_token = begin / kLanes * kLanes;
    for (int at = begin; at < end;) {
      const int tile_end = std::min((at / kTileTokens + 1) * kTileTokens, end);
      const int token = at / kLanes * kLanes, groups = groups_of(at, tile_end);
      for (int r = 0; r < Rows; ++r) {
        const int row = first_row + r;
        const float* row_scores = scores + r * kChunkTokens + (token - first_token);
        const auto weigh_row = [&] {
          weigh<Features>(states, row, ranges[row], token, groups, options.scale, row_scores,
                          weights + r * kRowStride);
        };
        float* sums = states.sums + row * kLanes;
        const Vec16 sums_before = load16(sums);
        weigh_row();
        if (all_at_most16(load16(sums), options.largest_sum)) continue;
        store16(sums, sums_before);
        raise_reference(
            states, row, dim_groups,
            ceil_of_largest<Features>(row_scores, token, groups, options.scale, ranges[row]),
            options.largest_sum);
        weigh_row();
      }
      multiply_values<Rows>(states, first_row, kv, at, tile_end, {0, dim_groups}, weights);
      at = tile_end;
    }
  }

  // Folds the scores of a row and 16 * groups tokens into its sums, and stores their weights.
  template <bool Features>
  RELAY_INLINE void weigh(const RowStates& states, int row, const RowRange& range, int first_token,
                          int groups, const ScoreScale& scale, const float* scores, W* weights) {
    const int end = first_token + groups * kLanes;
    float& reference = states.references[row];
    if (reference == kUnset)
      reference = first_reference<Features>(scores, first_token, end, scale, range);
    const float finite = reference == kUnset ? 0.f : reference;
    float* sums = states.sums + row * kLanes;
    if (range.begin_token > first_token || range.end_token < end)
      compute_weights<Features, true, kParts>(scores, first_token, groups, scale, range, finite,
                                              weights, kPartStride, sums);
    else
      compute_weights<Features, false, kParts>(scores, first_token, groups, scale, range, finite,
                                               weights, kPartStride, sums);
  }

  // Of 16 tokens, from that of `begin` on.
  static int groups_of(int begin, int end) {
    return (end - begin / kLanes * kLanes + kLanes - 1) / kLanes;
  }

  template <int Rows>
  RELAY_INLINE void multiply_keys(int first_row, const KvRow& kv, int first_token, int groups,
                                  float* scores, int64_t row_stride) {
    for (int g = 0; g < groups; g += kColumns)
      multiply_keys_columns<Rows, kColumns>(groups - g, first_row, kv, first_token + g * kLanes,
                                            scores + g * kLanes, row_stride);
  }

  template <int Rows, int Columns>
  RELAY_INLINE void multiply_keys_columns(int columns, int first_row, const KvRow& kv,
                                          int first_token, float* scores, int64_t row_stride) {
    if constexpr (Columns > 1) {
      if (columns < Columns) {
        multiply_keys_columns<Rows, Columns - 1>(columns, first_row, kv, first_token, scores,
                                                 row_stride);
        return;
      }
    }
    const int head_size = problem_.head_size;
    const T* lines[Columns];
    for (int c = 0; c < Columns; ++c)
      lines[c] = static_cast<const T*>(kv.key_group(first_token + c * kLanes));
    Vec16 acc[Rows][Columns] = {};
    multiply<T, Rows, Columns, 1>(lines, head_size / kPack<T>,
                                  queries_ + int64_t{first_row} * head_size, head_size, 0, acc,
                                  prefetch_);
    for (int r = 0; r < Rows; ++r)
      for (int c = 0; c < Columns; ++c) store16(scores + r * row_stride + c * kLanes, acc[r][c]);
  }

  template <int Rows>
  void multiply_values(const RowStates& states, int first_row, const KvRow& kv, int begin, int end,
                       DimGroups dims, const W* weights) {
    const int first_token = begin / kLanes * kLanes;
    if constexpr (kParts == 2)
      low_parts_.find(weights, Rows, kRowStride, kPartStride, first_token, groups_of(begin, end));
    for (int g = dims.first; g < dims.last; g += kColumns)
      multiply_values_columns<Rows, kColumns>(dims.last - g, states, first_row, kv, first_token,
                                              begin, end, g, weights);
  }

  template <int Rows, int Columns>
  RELAY_INLINE void multiply_values_columns(int columns, const RowStates& states, int first_row,
                                            const KvRow& kv, int first_token, int begin, int end,
                                            int group, const W* weights) {
    if constexpr (Columns > 1) {
      if (columns < Columns) {
        multiply_values_columns<Rows, Columns - 1>(columns, states, first_row, kv, first_token,
                                                   begin, end, group, weights);
        return;
      }
    }
    constexpr int kStep = kPack<T>;
    Vec16 acc[Rows][Columns];
    for (int r = 0; r < Rows; ++r)
      for (int c = 0; c < Columns; ++c) acc[r][c] = load16(states.output(first_row + r, group + c));
    for (int token = begin; token < end;) {
      const int block_end = kv.block_end(token);
      const int run_end = block_end < end ? block_end : end;
      const T* lines[Columns];
      const auto point_at = [&](int at) {
        for (int c = 0; c < Columns; ++c)
          lines[c] = static_cast<const T*>(kv.value_line(at, group + c));
        return weights + (at - first_token);
      };
      if (token % kStep != 0) {
        const W* at = point_at(token - 1);
        multiply<T, Rows, Columns, kParts>(lines, 1, at, kRowStride, kChunkTokens, acc,
                                           no_prefetch_, Pair::kSecondOnly);
        ++token;
      }
      while (run_end - token >= kStep) {
        const int same_end = low_parts_.same_until(token, run_end);
        const int steps = (same_end - token) / kStep;
        const W* at = point_at(token);
        if (low_parts_.at(token))
          multiply<T, Rows, Columns, kParts>(lines, steps, at, kRowStride, kChunkTokens, acc,
                                             prefetch_);
        else
          multiply<T, Rows, Columns, 1>(lines, steps, at, kRowStride, 0, acc, prefetch_);
        token += steps * kStep;
      }
      if (token < run_end) {
        const W* at = point_at(token);
        multiply<T, Rows, Columns, kParts>(lines, 1, at, kRowStride, kChunkTokens, acc,
                                           no_prefetch_, Pair::kFirstOnly);
        ++token;
      }
    }
    for (int r = 0; r < Rows; ++r)
      for (int c = 0; c < Columns; ++c) store16(states.output(first_row + r, group + c), acc[r][c]);
  }

  const Problem& problem_;
  W* queries_;
  [[no_unique_address]] LowParts<kParts> low_parts_;
  BlockPrefetch prefetch_;
  [[no_unique_address]] NoPrefetch no_prefetch_;
};

}  // namespace
}  // namespace relay

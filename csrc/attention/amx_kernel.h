// SPDX-License-Identifier: Apache-2.0
// Folds KV tokens into row states with tile registers: 32 rows by 512 tokens at a time. Rows that
// all see all of the tokens go through the pipeline; this file has the general path and the staging
// of fewer rows than a tile. Weights are rounded to bf16 once, and the denominator sums the rounded
// weights, so numerator and denominator share the rounding.
#pragma once

#include <algorithm>
#include <numeric>
#include <span>

#include "amx_pipeline.h"
#include "problem.h"

namespace relay {
namespace {

class AmxKernel {
 public:
  using Element = BFloat16;  // of the KV cache
  static constexpr int kFoldTokens = kUnitTokens;
  // Of a lane. The pipeline raises no reference: rows that grow further are folded again, so this
  // is as much as leaves room for outputs.
  static constexpr float kLargestSum = 0x1p110f;
  static int padded_rows(int rows) { return (rows + kRows - 1) / kRows * kRows; }
  static int64_t operand_bytes(int rows, int head_size) {
    return int64_t{rows} * TileProducts::padded_head_size(head_size) * int64_t{sizeof(BFloat16)} +
           int64_t{sizeof(Workspace)};
  }
  static RowStates layout(float* outputs, float* sums, float* references, int rows,
                          int /*head_size*/) {
    return {outputs, kLanes, int64_t{rows} * kLanes, sums, references};
  }
  static void enter_thread() { configure_tiles(kTileRows); }
  static void leave_thread() { release_tiles(); }

  AmxKernel(const Problem& problem, void* operands, int /*rows*/)
      : head_size_(problem.head_size),
        dim_groups_(problem.head_size / kLanes),
        work_(*static_cast<Workspace*>(operands)),
        products_(problem.head_size, work_.clean_tiles),
        query_stride_(products_.query_stride()),
        queries_(reinterpret_cast<BFloat16*>(static_cast<char*>(operands) + sizeof(Workspace))) {}

  void load_query(int row, const void* query) {
    BFloat16* to = queries_ + int64_t{row} * query_stride_;
    std::memcpy(to, query, head_size_ * sizeof(BFloat16));
    std::memset(to + head_size_, 0, (query_stride_ - head_size_) * sizeof(BFloat16));
  }

  template <bool Features>
  void fold(const RowStates& states, const RowRange* ranges, int first_row, int last_row,
            const KvRow& kv, int begin, int end, const ScoreScale& scale) {
    visit<Features, Pass::kFold>(states, ranges, first_row, last_row, kv, begin, end, scale, {},
                                 {});
  }

  // Stores the raw scores of tokens [begin, end).
  void store_scores(const RowStates& states, const RowRange* ranges, int first_row, int last_row,
                    const KvRow& kv, int begin, int end, const Stored& stored) {
    visit<false, Pass::kScores>(states, ranges, first_row, last_row, kv, begin, end, {}, stored,
                                {});
  }

  // Turns the stored scores of a row and tokens [begin, end) into weights, and folds them into its
  // reference and sums.
  template <bool Features>
  static void store_weights(const RowStates& states, int row, const RowRange& range, int begin,
                            int end, const ScoreScale& scale, float* stored) {
    float& reference = states.references[row];
    if (reference == kUnset)
      reference = first_reference<Features>(stored, begin, end, scale, range);
    alignas(64) BFloat16 rounded[kTileTokens];
    for (int token = begin; token < end; token += kTileTokens, stored += kTileTokens) {
      Vec16 w[2];
      masked_weights<Features>(range, reference, token, scale, stored, w);
      store16(stored, w[0]);
      store16(stored + kLanes, w[1]);
      finish_weights(w[0], w[1], states.sums + row * kLanes, rounded);
    }
  }

  // As `fold`, of stored weights and for some of the dims; sums and references stay as they are.
  void fold_stored(const RowStates& states, const RowRange* ranges, int first_row, int last_row,
                   const KvRow& kv, int begin, int end, const Stored& stored, DimGroups groups) {
    visit<false, Pass::kValues>(states, ranges, first_row, last_row, kv, begin, end, {}, stored,
                                groups);
  }

  // As `fold`, of some rows, and sums that are not to grow further than that.
  template <bool Features>
  void refold(const RowStates& states, const RowRange* ranges, std::span<const int> rows,
              const KvRow& kv, int begin, int end, const ScoreScale& scale, float largest_sum) {
    for (size_t i = 0; i < rows.size(); i += kRows) {
      const auto some = rows.subspan(i, std::min(rows.size() - i, size_t{kRows}));
      const int live = static_cast<int>(some.size());
      RowRange staged_ranges[kRows];
      for (int r = 0; r < live; ++r) staged_ranges[r] = ranges[some[r]];
      stage_queries(some);
      stage_states(states, some);
      const RowTile tile = staged_tile(staged_ranges, live);
      for (int unit = begin; unit < end; unit += kUnitTokens)
        fold_growing<Features>(tile, kv, unit, std::min(unit + kUnitTokens, end), scale,
                               largest_sum);
      unstage(states, some);
    }
  }

 private:
  struct Workspace {
    PipelineBuffers pipeline;
    alignas(64) BFloat16 staged_queries[kRows * 256];
    alignas(64) float staged_outputs[kRows * 256];
    alignas(64) float staged_sums[kRows * kLanes];
    alignas(64) float staged_references[kRows];
    CleanTiles clean_tiles;
  };

  struct Visible {  // the union of what the rows of a tile see of a range
    int begin, end;
    int first_tile() const { return begin / kTileTokens * kTileTokens; }
  };

  template <bool Features, Pass What>
  void visit(const RowStates& states, const RowRange* ranges, int first_row, int last_row,
             const KvRow& kv, int begin, int end, const ScoreScale& scale, const Stored& stored,
             DimGroups dims) {
    const int tiles = (last_row - first_row + kRows - 1) / kRows;
    const int last_live = last_row - first_row - (tiles - 1) * kRows;
    const bool staged = last_live > kTileRows && last_live < kRows;
    int last_tile[kRows];
    std::iota(last_tile, last_tile + kRows, first_row + (tiles - 1) * kRows);
    const std::span<const int> last_rows(last_tile, last_live);
    if (staged) {
      stage_queries(last_rows);
      if (What != Pass::kScores) stage_states(states, last_rows);
    }
    BlockPrefetch prefetch;
    WeightPipeline pipeline(products_, work_.pipeline, prefetch, scale.to_log2);
    if (tiles == 1 && What != Pass::kScores)
      for (int g = 0; g < dim_groups_; g += kGroupsPerPage) ask_for(kv.value_line(begin, g));
    const int step = tiles == 1 && last_live <= kTileRows ? kFewRowsTokens : kUnitTokens;
    for (int chunk = begin; chunk < end; chunk += step) {
      const int chunk_end = chunk + step < end ? chunk + step : end;
      if (tiles > 1) prefetch = BlockPrefetch(kv, chunk_end, kUnitTokens);
      for (int t = 0; t < tiles; ++t) {
        const int row = first_row + t * kRows;
        const bool last = t + 1 == tiles;
        const RowTile tile = last && staged ? staged_tile(ranges + row, last_live)
                                            : RowTile{queries_ + int64_t{row} * query_stride_,
                                                      states.output(row, 0),
                                                      states.group_stride,
                                                      states.sums + row * kLanes,
                                                      states.references + row,
                                                      ranges + row,
                                                      last ? last_live : kRows};
        const From where = t == 0 ? From::kMemory : From::kCache;
        int rest = chunk;
        if (What == Pass::kFold && !Features && tile.high()) {
          const int whole = chunk_end / kTileTokens * kTileTokens;
          if (is_plain(tile, chunk, whole)) {
            pipeline.push(tile, kv, chunk, whole, where);
            rest = whole;
          }
        }
        if (rest == chunk_end) continue;
        pipeline.drain();
        visit_unit<Features, What>(tile, row, kv, where, rest, chunk_end, scale, stored, dims);
      }
    }
    pipeline.drain();
    if (staged && What != Pass::kScores) unstage(states, last_rows);
  }

  // How many rows the registers of a tile have; those that do not exist are zeros.
  static int register_rows(int live) { return live > kTileRows ? kRows : live; }

  void stage_queries(std::span<const int> rows) {
    const int64_t stride = query_stride_;
    BFloat16* to = work_.staged_queries;
    for (const int row : rows) {
      std::memcpy(to, queries_ + row * stride, stride * sizeof(BFloat16));
      to += stride;
    }
    const int live = static_cast<int>(rows.size());
    std::memset(to, 0, (register_rows(live) - live) * stride * sizeof(BFloat16));
  }

  void stage_states(const RowStates& states, std::span<const int> rows) {
    const RowStates staged = staged_states();
    const int live = static_cast<int>(rows.size());
    for (int r = 0; r < live; ++r) copy_row(states, rows[r], staged, r, dim_groups_);
    for (int r = live; r < register_rows(live); ++r) {
      clear_row(staged, r, dim_groups_);
      staged.references[r] = 0.f;
    }
  }

  void unstage(const RowStates& states, std::span<const int> rows) {
    for (size_t r = 0; r < rows.size(); ++r)
      copy_row(staged_states(), r, states, rows[r], dim_groups_);
  }

  RowStates staged_states() {
    return {work_.staged_outputs, kLanes, int64_t{kRows} * kLanes, work_.staged_sums,
            work_.staged_references};
  }

  RowTile staged_tile(const RowRange* ranges, int live) const {
    return {work_.staged_queries,
            work_.staged_outputs,
            int64_t{kRows} * kLanes,
            work_.staged_sums,
            work_.staged_references,
            ranges,
            live};
  }

  static bool is_plain(const RowTile& tile, int begin, int end) {
    if (begin == end) return false;
    for (int r = 0; r < tile.live; ++r)
      if (tile.ranges[r].begin_token > begin || tile.ranges[r].end_token < end) return false;
    return true;
  }

  static Visible union_of(const RowTile& tile, int begin, int end) {
    Visible visible{end, begin};
    for (int r = 0; r < tile.live; ++r) {
      const RowRange& range = tile.ranges[r];
      visible.begin = range.begin_token < visible.begin ? range.begin_token : visible.begin;
      visible.end = range.end_token > visible.end ? range.end_token : visible.end;
    }
    visible.begin = visible.begin > begin ? visible.begin : begin;
    visible.end = visible.end < end ? visible.end : end;
    return visible;
  }

  // The general path: any range, masks and features, one phase after the other. `first_row`: of
  // the tile, among stored weights.
  template <bool Features, Pass What>
  void visit_unit(const RowTile& tile, int first_row, const KvRow& kv, From where, int begin,
                  int end, const ScoreScale& scale, const Stored& stored, DimGroups dims) {
    const Visible visible = union_of(tile, begin, end);
    if (visible.begin >= visible.end) return;
    use_low_rows(tile.low_rows());
    float* scores = work_.pipeline.scores[0];
    BFloat16* weights = work_.pipeline.weights[0];
    const int first_tile = visible.first_tile();
    alignas(64) float sums_before[kRows * kLanes];
    if constexpr (What == Pass::kFold)
      std::memcpy(sums_before, tile.sums, tile.live * kLanes * sizeof(float));
    const int num_tiles = (visible.end - first_tile + kTileTokens - 1) / kTileTokens;
    for (int t = 0; t < num_tiles; ++t) {
      const int token = first_tile + t * kTileTokens;
      if (What != Pass::kValues && t % kScoreTiles == 0)
        for (int i = 0; i < kScoreTiles && t + i < num_tiles; ++i)
          multiply_visible_keys(tile, kv, where, token + i * kTileTokens, visible.end,
                                scores + i * kScoreFloats);
      if (What == Pass::kFold && where == From::kMemory && t + 1 == num_tiles &&
          visible.end % kTileTokens != 0)
        products_.ask_for_values(kv, token, visible.end, dim_groups_);
      for (int r = 0; r < tile.live; ++r) {
        float* row_scores = scores + t % kScoreTiles * kScoreFloats + r * kTileTokens;
        if constexpr (What == Pass::kScores) {
          std::memcpy(stored.at(first_row + r, token), row_scores, kTileTokens * sizeof(float));
          continue;
        }
        BFloat16* row_weights = weights + weight_at(t, r);
        if constexpr (What == Pass::kValues) {
          const float* at = stored.at(first_row + r, token);
          alignas(64) float unused_sums[kLanes] = {};
          finish_weights(load16(at), load16(at + kLanes), unused_sums, row_weights);
        } else {
          weigh<Features>(tile, r, token, scale, row_scores, row_weights);
        }
      }
      for (int r = tile.live; What != Pass::kScores && r < register_rows(tile.live); ++r)
        std::memset(weights + weight_at(t, r), 0, kTileTokens * sizeof(BFloat16));
    }
    if constexpr (What == Pass::kScores) return;
    if constexpr (What == Pass::kFold) {
      bool within_range = true;
      for (int r = 0; r < tile.live; ++r)
        within_range &= all_at_most16(load16(tile.sums + r * kLanes), kLargestSum);
      if (!within_range) {
        std::memcpy(tile.sums, sums_before, tile.live * kLanes * sizeof(float));
        fold_growing<Features>(tile, kv, visible.begin, visible.end, scale, kLargestSum);
        return;
      }
      dims = {0, dim_groups_};
    }
    products_.multiply_visible_values(tile, weights, kv, where, visible.begin, visible.end, dims);
  }

  void multiply_visible_keys(const RowTile& tile, const KvRow& kv, From where, int token,
                             int visible_end, float* scores) const {
    products_.multiply_keys(tile, kv, where, token, tile.high(), token + kLanes < visible_end,
                            scores, [] {});
  }

  // As `visit_unit`, with references that are raised at the first token of a tile.
  template <bool Features>
  __attribute__((noinline)) void fold_growing(const RowTile& tile, const KvRow& kv, int begin,
                                              int end, const ScoreScale& scale, float largest_sum) {
    const Visible visible = union_of(tile, begin, end);
    if (visible.begin >= visible.end) return;
    use_low_rows(tile.low_rows());
    const RowStates states = {tile.outputs, kLanes, tile.group_stride, tile.sums, tile.references};
    float* scores = work_.pipeline.scores[0];
    BFloat16* weights = work_.pipeline.weights[0];
    const int first_tile = visible.first_tile();
    int multiplied = visible.begin;  // values of the tokens before it
    const auto multiply_values = [&](int to) {
      if (multiplied >= to) return;
      const int t = (multiplied - first_tile) / kTileTokens;
      products_.multiply_visible_values(tile, weights + weight_at(t, 0), kv, From::kCache,
                                        multiplied, to, {0, dim_groups_});
      multiplied = to;
    };
    for (int token = first_tile; token < visible.end; token += kTileTokens) {
      const int t = (token - first_tile) / kTileTokens;
      multiply_visible_keys(tile, kv, From::kMemory, token, visible.end, scores);
      for (int r = 0; r < tile.live; ++r) {
        const float* row_scores = scores + r * kTileTokens;
        const auto weigh_row = [&] {
          weigh<Features>(tile, r, token, scale, row_scores, weights + weight_at(t, r));
        };
        float* sums = tile.sums + r * kLanes;
        const Vec16 sums_before = load16(sums);
        weigh_row();
        if (all_at_most16(load16(sums), largest_sum)) continue;
        store16(sums, sums_before);
        multiply_values(token);
        raise_reference(states, r, dim_groups_,
                        ceil_of_largest<Features>(row_scores, token, kTileTokens / kLanes, scale,
                                                  tile.ranges[r]),
                        largest_sum);
        weigh_row();
      }
      for (int r = tile.live; r < register_rows(tile.live); ++r)
        std::memset(weights + weight_at(t, r), 0, kTileTokens * sizeof(BFloat16));
    }
    multiply_values(visible.end);
  }

  // Folds the scores of a row and the 32 tokens from `token` on into its sums, and stores their
  // weights.
  template <bool Features>
  static void weigh(const RowTile& tile, int row, int token, const ScoreScale& scale,
                    const float* scores, BFloat16* weights) {
    const RowRange& range = tile.ranges[row];
    float& reference = tile.references[row];
    if (reference == kUnset)
      reference = first_reference<Features>(scores, token, token + kTileTokens, scale, range);
    Vec16 w[2];
    masked_weights<Features>(range, reference, token, scale, scores, w);
    finish_weights(w[0], w[1], tile.sums + row * kLanes, weights);
  }

  // Of one row and the 32 tokens from `token` on.
  template <bool Features>
  static void masked_weights(const RowRange& range, float reference, int token,
                             const ScoreScale& scale, const float* scores, Vec16 (&w)[2]) {
    const float finite = reference == kUnset ? 0.f : reference;
    for (int half = 0; half < 2; ++half) {
      const int at = token + half * kLanes;
      const Vec16 raw = load16(scores + half * kLanes);
      if constexpr (Features)
        w[half] = exp2_16(log2_scores<true>(raw, at, scale, range) - set16(finite));
      else
        w[half] = exp2_16(fma16(raw, set16(scale.to_log2), set16(-finite)));
      w[half] = select16(lanes16(range.begin_token - at, range.end_token - at), w[half], zero16());
    }
  }

  const int head_size_, dim_groups_;
  Workspace& work_;
  const TileProducts products_;
  const int query_stride_;
  BFloat16* queries_;
};

}  // namespace
}  // namespace relay

// SPDX-License-Identifier: Apache-2.0
// Folds KV tokens into row states with tile registers: 32 rows by 512 tokens at a time. Rows that
// all see all of the tokens go through the pipeline; this file has the general path and the staging
// of fewer rows than a tile. Weights are rounded to bf16 once, and the denominator sums the rounded
// weights, so numerator and denominator share the rounding.
#pragma once

#include "amx_pipeline.h"
#include "problem.h"

namespace relay {
namespace {

class AmxKernel {
 public:
  using Element = BFloat16;  // of the KV cache
  static constexpr int kFoldTokens = kUnitTokens;
  static int padded_rows(int rows) { return (rows + kRows - 1) / kRows * kRows; }
  static int64_t operand_bytes(int rows, int head_size) {
    return int64_t{rows} * TileProducts::padded_head_size(head_size) * int64_t{sizeof(BFloat16)} +
           int64_t{sizeof(Workspace)};
  }
  static RowStates layout(float* outputs, float* sums, float* references, int rows,
                          int /*head_size*/) {
    return {outputs, kLanes, int64_t{rows} * kLanes, sums, references};
  }
  static void enter_thread() { configure_tiles(); }
  static void leave_thread() { release_tiles(); }

  AmxKernel(const Problem& problem, void* operands, int /*rows*/)
      : head_size_(problem.head_size),
        dim_groups_(problem.head_size / kLanes),
        work_(*static_cast<Workspace*>(operands)),
        products_(problem.head_size, work_.clean_tile),
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

  template <bool Features>
  void raise_reference(const RowStates& states, const RowRange* ranges, int row, const KvRow& kv,
                       int begin, int end, const ScoreScale& scale) {
    stage_queries(row, 1);
    stage_states(states, row, 1);
    const RowTile tile = staged_tile(ranges + row, 1);
    const Visible visible = union_of(tile, begin, end);
    float& reference = states.references[row];
    for (int at = visible.first_tile(); at < visible.end; at += kTileTokens) {
      float* scores = work_.pipeline.scores[0];
      products_.multiply_keys(tile, kv, From::kMemory, at, false, scores, [] {});
      const float largest =
          ceil_of_largest<Features>(scores, at, kTileTokens / kLanes, scale, ranges[row]);
      reference = largest > reference ? largest : reference;
    }
  }

 private:
  struct Workspace {
    PipelineBuffers pipeline;
    alignas(64) BFloat16 staged_queries[kRows * 256];
    alignas(64) float staged_outputs[kRows * 256];
    alignas(64) float staged_sums[kRows * kLanes];
    alignas(64) float staged_references[kRows];
    alignas(64) BFloat16 clean_tile[kTileRows * 32];
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
    const bool staged = last_live < kRows;
    const int last_first = first_row + (tiles - 1) * kRows;
    if (staged) {
      stage_queries(last_first, last_live);
      if (What != Pass::kScores) stage_states(states, last_first, last_live);
    }
    BlockPrefetch prefetch;
    WeightPipeline pipeline(products_, work_.pipeline, prefetch, scale.to_log2);
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
                                                      kRows};
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
    if (staged && What != Pass::kScores) unstage(states, last_first, last_live);
  }

  // Of a tile with so many rows; those that do not exist are zeros.
  static int staged_rows(int live) { return live > kTileRows ? kRows : kTileRows; }

  void stage_queries(int first_row, int live) {
    const int64_t stride = query_stride_;
    std::memcpy(work_.staged_queries, queries_ + first_row * stride,
                live * stride * sizeof(BFloat16));
    std::memset(work_.staged_queries + live * stride, 0,
                (staged_rows(live) - live) * stride * sizeof(BFloat16));
  }

  void stage_states(const RowStates& states, int first_row, int live) {
    for (int r = 0; r < live; ++r) {
      store16(work_.staged_sums + r * kLanes, load16(states.sums + (first_row + r) * kLanes));
      work_.staged_references[r] = states.references[first_row + r];
      for (int g = 0; g < dim_groups_; ++g)
        store16(work_.staged_outputs + (g * kRows + r) * kLanes,
                load16(states.output(first_row + r, g)));
    }
    for (int r = live; r < staged_rows(live); ++r) {
      store16(work_.staged_sums + r * kLanes, zero16());
      work_.staged_references[r] = 0.f;
      for (int g = 0; g < dim_groups_; ++g)
        store16(work_.staged_outputs + (g * kRows + r) * kLanes, zero16());
    }
  }

  void unstage(const RowStates& states, int first_row, int live) const {
    for (int r = 0; r < live; ++r) {
      store16(states.sums + (first_row + r) * kLanes, load16(work_.staged_sums + r * kLanes));
      states.references[first_row + r] = work_.staged_references[r];
      for (int g = 0; g < dim_groups_; ++g)
        store16(states.output(first_row + r, g),
                load16(work_.staged_outputs + (g * kRows + r) * kLanes));
    }
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
    float* scores = work_.pipeline.scores[0];
    BFloat16* weights = work_.pipeline.weights[0];
    const int first_tile = visible.first_tile();
    for (int token = first_tile; token < visible.end; token += kTileTokens) {
      const int t = (token - first_tile) / kTileTokens;
      if constexpr (What != Pass::kValues)
        products_.multiply_keys(tile, kv, where, token, tile.high(), scores, [] {});
      for (int r = 0; r < tile.live; ++r) {
        float* row_scores = scores + r * kTileTokens;
        if constexpr (What == Pass::kScores) {
          std::memcpy(stored.at(first_row + r, token), row_scores, kTileTokens * sizeof(float));
          continue;
        }
        Vec16 w[2];
        alignas(64) float unused_sums[kLanes] = {};
        float* sums = unused_sums;
        if constexpr (What == Pass::kValues) {
          const float* at = stored.at(first_row + r, token);
          w[0] = load16(at);
          w[1] = load16(at + kLanes);
        } else {
          sums = tile.sums + r * kLanes;
          float& reference = tile.references[r];
          if (reference == kUnset)
            reference = first_reference<Features>(row_scores, token, token + kTileTokens, scale,
                                                  tile.ranges[r]);
          masked_weights<Features>(tile.ranges[r], reference, token, scale, row_scores, w);
        }
        finish_weights(w[0], w[1], sums, weights + weight_at(t, r));
      }
      for (int r = tile.live; What != Pass::kScores && r < staged_rows(tile.live); ++r)
        std::memset(weights + weight_at(t, r), 0, kTileTokens * sizeof(BFloat16));
    }
    if constexpr (What == Pass::kScores) return;
    if constexpr (What == Pass::kFold) dims = {0, dim_groups_};
    for (int g = dims.first; g < dims.last; ++g)
      products_.multiply_visible_values(tile, weights, kv, where, visible.begin, visible.end, g);
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

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
    const int tiles = (last_row - first_row + kRows - 1) / kRows;
    const int last_live = last_row - first_row - (tiles - 1) * kRows;
    const bool staged = last_live < kRows;
    const int last_first = first_row + (tiles - 1) * kRows;
    if (staged) stage(states, last_first, last_live);
    ProductPrefetch prefetch;
    WeightPipeline pipeline(products_, work_.pipeline, prefetch, scale.to_log2);
    const int halves = 2 * tiles - (last_live <= kTileRows);
    for (int chunk = begin; chunk < end; chunk += kUnitTokens) {
      const int chunk_end = chunk + kUnitTokens < end ? chunk + kUnitTokens : end;
      prefetch = ProductPrefetch(kv, chunk_end, halves);
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
        if (!Features && tile.high() && is_plain(tile, chunk, chunk_end)) {
          pipeline.push(tile, kv, chunk, chunk_end);
        } else {
          pipeline.drain();
          fold_unit<Features>(tile, kv, chunk, chunk_end, scale, prefetch);
        }
      }
    }
    pipeline.drain();
    if (staged) unstage(states, last_first, last_live);
  }

  template <bool Features>
  void raise_reference(const RowStates& states, const RowRange* ranges, int row, const KvRow& kv,
                       int begin, int end, const ScoreScale& scale) {
    stage(states, row, 1);
    const RowTile tile = staged_tile(ranges + row, 1);
    const Visible visible = union_of(tile, begin, end);
    float& reference = states.references[row];
    for (int at = visible.first_tile(); at < visible.end; at += kTileTokens) {
      float* scores = work_.pipeline.scores[0];
      products_.multiply_keys(tile, kv, at, false, scores, [] {});
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

  void stage(const RowStates& states, int first_row, int live) {
    for (int r = 0; r < live; ++r) {
      std::memcpy(work_.staged_queries + r * query_stride_,
                  queries_ + int64_t{first_row + r} * query_stride_,
                  query_stride_ * sizeof(BFloat16));
      store16(work_.staged_sums + r * kLanes, load16(states.sums + (first_row + r) * kLanes));
      work_.staged_references[r] = states.references[first_row + r];
      for (int g = 0; g < dim_groups_; ++g)
        store16(work_.staged_outputs + (g * kRows + r) * kLanes,
                load16(states.output(first_row + r, g)));
    }
    for (int r = live; r < kRows; ++r) {
      std::memset(work_.staged_queries + r * query_stride_, 0, query_stride_ * sizeof(BFloat16));
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
    if ((end - begin) % kScoreTokens != 0) return false;
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

  // The general path: any range, masks and features, one phase after the other.
  template <bool Features>
  void fold_unit(const RowTile& tile, const KvRow& kv, int begin, int end, const ScoreScale& scale,
                 ProductPrefetch& prefetch) {
    const Visible visible = union_of(tile, begin, end);
    if (visible.begin >= visible.end) return;
    const auto between = [&] { prefetch.next(); };
    float* scores = work_.pipeline.scores[0];
    BFloat16* weights = work_.pipeline.weights[0];
    const int first_tile = visible.first_tile();
    for (int token = first_tile; token < visible.end; token += kTileTokens) {
      const int t = (token - first_tile) / kTileTokens;
      products_.multiply_keys(tile, kv, token, tile.high(), scores, between);
      for (int r = 0; r < tile.live; ++r)
        masked_weights<Features>(tile, r, token, scale, scores, weights + weight_at(t, r));
      for (int r = tile.live; r < kRows; ++r)
        std::memset(weights + weight_at(t, r), 0, kTileTokens * sizeof(BFloat16));
    }
    for (int g = 0; g < dim_groups_; ++g)
      products_.multiply_visible_values(tile, weights, kv, visible.begin, visible.end, g, between);
  }

  // Row r of a score tile that starts at `token`.
  template <bool Features>
  static void masked_weights(const RowTile& tile, int r, int token, const ScoreScale& scale,
                             const float* tile_scores, BFloat16* weights) {
    const RowRange& range = tile.ranges[r];
    const float* scores = tile_scores + r * kTileTokens;
    float& reference = tile.references[r];
    if (reference == kUnset && range.begin_token < token + kTileTokens && range.end_token > token)
      reference = finite_reference(
          ceil_of_largest<Features>(scores, token, kTileTokens / kLanes, scale, range));
    const float finite = reference == kUnset ? 0.f : reference;
    Vec16 w[2];
    for (int half = 0; half < 2; ++half) {
      const int at = token + half * kLanes;
      const Vec16 raw = load16(scores + half * kLanes);
      if constexpr (Features)
        w[half] = exp2_16(log2_scores<true>(raw, at, scale, range) - set16(finite));
      else
        w[half] = exp2_16(fma16(raw, set16(scale.to_log2), set16(-finite)));
      w[half] = select16(lanes16(range.begin_token - at, range.end_token - at), w[half], zero16());
    }
    finish_weights(w[0], w[1], tile.sums + r * kLanes, weights);
  }

  const int head_size_, dim_groups_;
  Workspace& work_;
  const TileProducts products_;
  const int query_stride_;
  BFloat16* queries_;
};

}  // namespace
}  // namespace relay

// SPDX-License-Identifier: Apache-2.0
// The fast path of the AMX kernel, for rows that see every token. While the products of one part of
// the keys and of the previous tokens' values run, the weights of the scores just before them are
// computed, a row between two products.
#pragma once

#include "amx_products.h"

namespace relay {
namespace {

struct PipelineBuffers {
  alignas(64) float scores[2][kScoreTiles * kScoreFloats];        // [tile][row][token]
  alignas(64) BFloat16 weights[2][kUnitTiles * 2 * kWeightTile];  // see weight_at
};

// Rounds the weights of 32 tokens of a row, and adds the rounded ones to the row's sums.
RELAY_INLINE void finish_weights(Vec16 low, Vec16 high, float* sums, BFloat16* weights) {
  const __m512i pairs = round_pairs32(low, high);
  store16(sums, add_pairs16(load16(sums), pairs));
  _mm512_store_si512(weights, pairs);
}

class WeightPipeline {
 public:
  WeightPipeline(const TileProducts& products, PipelineBuffers& buffers, BlockPrefetch& prefetch,
                 float to_log2)
      : products_(products), buffers_(buffers), prefetch_(prefetch), to_log2_(to_log2) {}

  // Folds up to kUnitTokens tokens, whole tiles of them; they end up in the states of `tile` with
  // the next push or drain.
  void push(const RowTile& tile, const KvRow& kv, int begin, int end, From where) {
    use_low_rows(kTileRows);
    const Unit unit{tile, &kv, begin, end, where, next_buffer_};
    next_buffer_ ^= 1;
    // The weights of value_unit_ are complete once this unit's first part has run.
    const int spread = unit.score_parts() - 1;
    for (int part = 0; part < unit.score_parts(); ++part) {
      const bool multiply_values = has_values_ && part > 0;
      const int first = multiply_values ? value_pairs() * (part - 1) / spread : 0;
      const int last = multiply_values ? value_pairs() * part / spread : 0;
      run_part(&unit, part, first, last);
    }
    if (has_values_ && spread == 0) run_part(nullptr, 0, 0, value_pairs());
    value_unit_ = unit;
    has_values_ = true;
  }

  // Finishes what was pushed.
  void drain() {
    if (!has_values_) return;
    run_part(nullptr, 0, 0, 0);
    run_part(nullptr, 0, 0, value_pairs());
    has_values_ = false;
  }

 private:
  struct Unit {  // a row tile and tokens that all of its rows see
    RowTile tile;
    const KvRow* kv;
    int begin, end;
    From where;
    int buffer;  // which weights
    int score_parts() const { return (end - begin + kScoreTokens - 1) / kScoreTokens; }
    int score_tiles(int part) const {
      const int tiles = (end - begin) / kTileTokens - part * kScoreTiles;
      return tiles < kScoreTiles ? tiles : kScoreTiles;
    }
  };

  // Weights of the 32 rows of up to four score tiles, one row of one tile a call.
  class WeightRows {
   public:
    WeightRows() = default;
    WeightRows(const RowTile& tile, int tiles, const float* scores, BFloat16* weights,
               float to_log2)
        : remaining_(tiles * kRows),
          scale_(set16(to_log2)),
          scores_(scores),
          weights_(weights),
          sums_(tile.sums),
          references_(tile.references) {
      for (int r = 0; r < kRows; ++r)
        if (references_[r] == kUnset) references_[r] = first_reference(scores_ + r * kTileTokens);
    }
    RELAY_INLINE void next() {
      if (remaining_ == 0) return;
      const int row = -remaining_ & (kRows - 1);
      const Vec16 reference = set16(-references_[row]);
      finish_weights(exp2_16(fma16(load16(scores_), scale_, reference)),
                     exp2_16(fma16(load16(scores_ + kLanes), scale_, reference)),
                     sums_ + row * kLanes, weights_);
      scores_ += kTileTokens;
      weights_ += kTileTokens;
      --remaining_;
    }
    void rest() {
      while (remaining_) next();
    }

   private:
    float first_reference(const float* scores) const {
      const Vec16 largest = max16(load16(scores) * scale_, load16(scores + kLanes) * scale_);
      return finite_reference(std::ceil(max_of16(largest)));
    }

    int remaining_ = 0;
    Vec16 scale_ = zero16();
    const float* scores_ = nullptr;
    BFloat16* weights_ = nullptr;
    float* sums_ = nullptr;
    float* references_ = nullptr;
  };

  int value_pairs() const { return (products_.dim_groups() + 1) / 2; }

  // Products of part `part` of `unit`'s keys (unless null) and of dim group pairs
  // [first_pair, last_pair) of the pending unit's values, with the pending weights in between.
  void run_part(const Unit* unit, int part, int first_pair, int last_pair) {
    WeightRows rows = pending_weights();
    BlockPrefetch prefetch = prefetch_;
    const auto between = [&]() __attribute__((always_inline)) {
      prefetch.next<1>();
      rows.next();
    };
    const int to = score_buffer_ ^ 1;
    if (unit) {
      for (int t = 0; t < unit->score_tiles(part); ++t)
        products_.multiply_keys(unit->tile, *unit->kv, unit->where,
                                unit->begin + part * kScoreTokens + t * kTileTokens, true, true,
                                buffers_.scores[to] + t * kScoreFloats, between);
    }
    for (int pair = first_pair; pair < last_pair; ++pair)
      products_.multiply_value_pair(value_unit_.tile, buffers_.weights[value_unit_.buffer],
                                    *value_unit_.kv, value_unit_.where, value_unit_.begin,
                                    value_unit_.end, 2 * pair, between);
    rows.rest();
    prefetch_ = prefetch;
    has_scores_ = unit != nullptr;
    if (unit) {
      score_unit_ = *unit;
      score_part_ = part;
      score_buffer_ = to;
    }
  }

  WeightRows pending_weights() const {
    if (!has_scores_) return {};
    return {score_unit_.tile, score_unit_.score_tiles(score_part_), buffers_.scores[score_buffer_],
            buffers_.weights[score_unit_.buffer] + weight_at(score_part_ * kScoreTiles, 0),
            to_log2_};
  }

  const TileProducts& products_;
  PipelineBuffers& buffers_;
  BlockPrefetch& prefetch_;
  const float to_log2_;
  bool has_values_ = false, has_scores_ = false;
  Unit value_unit_{};   // its weights are (being) computed, its values not yet multiplied
  Unit score_unit_{};   // the unit of score_part_
  int score_part_ = 0;  // whose weights are to be computed next
  int next_buffer_ = 0, score_buffer_ = 0;
};

}  // namespace
}  // namespace relay

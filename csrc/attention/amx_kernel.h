// SPDX-License-Identifier: Apache-2.0
// Folds KV tokens into row states with tile registers: 32 rows by 512 tokens at a time.
//
// The tile units and the vector units work side by side: while the products of one part of the keys
// and of the previous tokens' values run, the weights of the scores just before them are computed,
// a row between two products. Weights are rounded to bf16 once, and the denominator sums the
// rounded weights, so numerator and denominator share the rounding.
#pragma once

#include "driver.h"
#include "tile_registers.h"
#include "weights.h"

namespace relay {
namespace {

constexpr int kRows = 32;          // of a row tile: two tile registers
constexpr int kScoreTokens = 128;  // of one part of the keys: four 32 x 32 score tiles
constexpr int kUnitTokens = 512;   // between loads and stores of the running outputs
constexpr int kStepDims = 32;      // summed by one tile product of queries and keys
constexpr int kScoreTiles = kScoreTokens / kTileTokens;
constexpr int kUnitTiles = kUnitTokens / kTileTokens;
constexpr int kScoreFloats = kRows * kTileTokens;
constexpr int kWeightTile = kTileRows * kTileTokens;  // bf16 elements of a 16-row weight tile

// 32 rows of states and queries, in place or staged.
struct RowTile {
  const BFloat16* queries;  // padded_head_size elements a row
  float* outputs;           // 16 floats a row, group_stride from one dim group to the next
  int64_t group_stride;
  float* sums;
  float* references;
  const RowRange* ranges;
  int live;  // rows that exist
};

class AmxKernel {
 public:
  static int padded_rows(int rows) { return (rows + kRows - 1) / kRows * kRows; }
  static int padded_head_size(int head_size) {
    return (head_size + kStepDims - 1) / kStepDims * kStepDims;
  }
  static int64_t operand_bytes(int rows, int head_size) {
    return int64_t{rows} * padded_head_size(head_size) * int64_t{sizeof(BFloat16)} +
           int64_t{sizeof(Workspace)};
  }
  static RowStates layout(float* outputs, float* sums, float* references, int rows,
                          int /*head_size*/) {
    return {outputs, kLanes, int64_t{rows} * kLanes, sums, references};
  }
  static void enter_thread() { configure_tiles(); }
  static void leave_thread() { release_tiles(); }

  AmxKernel(const Problem& problem, void* operands, int rows)
      : head_size_(problem.head_size),
        query_stride_(padded_head_size(problem.head_size)),
        dim_groups_(problem.head_size / kLanes),
        work_(*static_cast<Workspace*>(operands)),
        queries_(reinterpret_cast<BFloat16*>(static_cast<char*>(operands) + sizeof(Workspace))) {
    (void)rows;
  }

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
    Pipeline pipeline{scale.to_log2};
    for (int chunk = begin; chunk < end; chunk += kUnitTokens) {
      const int chunk_end = chunk + kUnitTokens < end ? chunk + kUnitTokens : end;
      const int next_end =
          chunk_end + kUnitTokens < kv.end_token ? chunk_end + kUnitTokens : kv.end_token;
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
        const Prefetch prefetch{&kv, chunk_end, next_end, t, tiles};
        if (!Features && tile.live > kTileRows && is_plain(tile, chunk, chunk_end)) {
          push(pipeline, tile, kv, chunk, chunk_end, prefetch);
        } else {
          drain(pipeline);
          prefetch.all();
          fold_unit<Features>(tile, kv, chunk, chunk_end, scale);
        }
      }
    }
    drain(pipeline);
    if (staged) unstage(states, last_first, last_live);
  }

  template <bool Features>
  void raise_reference(const RowStates& states, const RowRange* ranges, int row, const KvRow& kv,
                       int begin, int end, const ScoreScale& scale) {
    stage(states, row, 1);
    const RowTile tile = staged_tile(ranges + row, 1);
    for (int token = begin; token < end; token += kScoreTokens) {
      const Visible visible =
          union_of(tile, token, token + kScoreTokens < end ? token + kScoreTokens : end);
      if (visible.begin >= visible.end) continue;
      const int groups = multiply_keys(tile, kv, visible, work_.scores[0]);
      float& reference = states.references[row];
      for (int t = 0; t < groups; ++t) {
        const int at = visible.first_tile() + t * kTileTokens;
        const float largest = ceil_of_largest<Features>(work_.scores[0] + t * kScoreFloats, at,
                                                        kTileTokens / kLanes, scale, ranges[row]);
        reference = largest > reference ? largest : reference;
      }
    }
  }

 private:
  struct Workspace {
    alignas(64) float scores[2][kScoreTiles * kScoreFloats];        // [tile][row][token]
    alignas(64) BFloat16 weights[2][kUnitTiles * 2 * kWeightTile];  // [tile][row half][row][token]
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

  // A part of the blocks after this chunk, to be asked for while this unit is computed.
  struct Prefetch {
    const KvRow* kv;
    int begin, end, part, parts;
    void some(int step, int steps) const {
      kv->prefetch(begin, end, part * steps + step, parts * steps, sizeof(BFloat16));
    }
    void all() const { some(0, 1); }
  };

  struct Unit {  // a row tile and up to kUnitTokens tokens all of its rows see
    RowTile tile;
    const KvRow* kv;
    int begin, end;
    int buffer;  // which weights
    int score_parts() const { return (end - begin) / kScoreTokens; }
  };

  struct Pipeline {
    float to_log2;
    bool has_values = false, has_scores = false;
    Unit values{};       // its weights are (being) computed, its values not yet multiplied
    Unit scores{};       // the unit of `score_part`
    int score_part = 0;  // whose weights are to be computed next
    int next_buffer = 0;
    int score_buffer = 0;
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
  void fold_unit(const RowTile& tile, const KvRow& kv, int begin, int end,
                 const ScoreScale& scale) {
    const Visible all = union_of(tile, begin, end);
    if (all.begin >= all.end) return;
    const int first_tile = all.first_tile();
    for (int token = first_tile; token < all.end; token += kScoreTokens) {
      const Visible part{token > all.begin ? token : all.begin,
                         token + kScoreTokens < all.end ? token + kScoreTokens : all.end};
      const int tiles = multiply_keys(tile, kv, part, work_.scores[0]);
      for (int t = 0; t < tiles; ++t) {
        const int at = token + t * kTileTokens;
        for (int r = 0; r < tile.live; ++r)
          masked_weights<Features>(
              tile, r, at, scale, work_.scores[0] + t * kScoreFloats,
              work_.weights[0] + weight_at((at - first_tile) / kTileTokens, r));
        for (int r = tile.live; r < kRows; ++r)
          std::memset(work_.weights[0] + weight_at((at - first_tile) / kTileTokens, r), 0,
                      kTileTokens * sizeof(BFloat16));
      }
    }
    for (int g = 0; g < dim_groups_; ++g) {
      const int64_t low_at = g * tile.group_stride, high_at = low_at + kTileRows * kLanes;
      const bool high = tile.live > kTileRows;
      tile_load<0>(tile.outputs + low_at, kTileRowBytes);
      if (high) tile_load<1>(tile.outputs + high_at, kTileRowBytes);
      for (int token = first_tile; token < all.end; token += kTileTokens) {
        const BFloat16* weights =
            work_.weights[0] + weight_at((token - first_tile) / kTileTokens, 0);
        tile_load<6>(clean_values(kv, token, g, all), kTileRowBytes);
        tile_load<4>(weights, kTileRowBytes);
        tile_multiply<0, 4, 6>();
        if (high) {
          tile_load<5>(weights + kWeightTile, kTileRowBytes);
          tile_multiply<1, 5, 6>();
        }
      }
      tile_store<0>(tile.outputs + low_at, kTileRowBytes);
      if (high) tile_store<1>(tile.outputs + high_at, kTileRowBytes);
    }
  }

  static int weight_at(int tile, int row) { return tile * 2 * kWeightTile + row * kTileTokens; }

  // 32 tokens x 16 dims of values; slots nobody sees are cleared, for 0 * NaN is NaN.
  const BFloat16* clean_values(const KvRow& kv, int token, int group, const Visible& visible) {
    const BFloat16* values =
        static_cast<const BFloat16*>(kv.value_line(token, group, sizeof(BFloat16)));
    if (token >= visible.begin && token + kTileTokens <= visible.end) return values;
    for (int i = 0; i < kTileTokens * kLanes; ++i) {
      const int slot = token + i / 32 * 2 + i % 2;
      work_.clean_tile[i] = slot >= visible.begin && slot < visible.end ? values[i] : BFloat16{0};
    }
    return work_.clean_tile;
  }

  // Scores of the 32-token tiles that hold visible tokens; returns how many tiles.
  int multiply_keys(const RowTile& tile, const KvRow& kv, const Visible& visible, float* scores) {
    int tiles = 0;
    for (int token = visible.first_tile(); token < visible.end; token += kTileTokens, ++tiles)
      multiply_key_tile(tile, kv, token, tile.live > kTileRows, scores + tiles * kScoreFloats,
                        [] {});
    return tiles;
  }

  // 32 rows (16 unless `high`) by 32 tokens of scores; calls `between` after every product.
  template <class F>
  RELAY_INLINE void multiply_key_tile(const RowTile& tile, const KvRow& kv, int token, bool high,
                                      float* scores, F between) {
    const int64_t query_bytes = query_stride_ * int64_t{sizeof(BFloat16)};
    const BFloat16* low_queries = tile.queries;
    const BFloat16* high_queries = tile.queries + kTileRows * query_stride_;
    const BFloat16* k0 = static_cast<const BFloat16*>(kv.key_group(token, sizeof(BFloat16)));
    const BFloat16* k1 = k0 + kLanes * head_size_;
    tile_zero<0>();
    tile_zero<1>();
    tile_zero<2>();
    tile_zero<3>();
    for (int d = 0; d < head_size_; d += kStepDims) {
      const bool whole = d + kStepDims <= head_size_;
      tile_load<4>(low_queries + d, query_bytes);
      if (high) tile_load<5>(high_queries + d, query_bytes);
      tile_load<6>(whole ? k0 + d * kLanes : clean_keys(k0 + d * kLanes), kTileRowBytes);
      tile_multiply<0, 4, 6>();
      between();
      if (high) {
        tile_multiply<2, 5, 6>();
        between();
      }
      tile_load<7>(whole ? k1 + d * kLanes : clean_keys(k1 + d * kLanes), kTileRowBytes);
      tile_multiply<1, 4, 7>();
      between();
      if (high) {
        tile_multiply<3, 5, 7>();
        between();
      }
    }
    constexpr int64_t kScoreRowBytes = kTileTokens * int64_t{sizeof(float)};
    tile_store<0>(scores, kScoreRowBytes);
    tile_store<1>(scores + kLanes, kScoreRowBytes);
    if (high) {
      tile_store<2>(scores + kTileRows * kTileTokens, kScoreRowBytes);
      tile_store<3>(scores + kTileRows * kTileTokens + kLanes, kScoreRowBytes);
    }
  }

  // The last 16 dims of a head size that is not a multiple of 32; what follows them is other
  // tokens'.
  const BFloat16* clean_keys(const BFloat16* keys) {
    constexpr int kHalf = kTileRows * 32 / 2;
    std::memcpy(work_.clean_tile, keys, kHalf * sizeof(BFloat16));
    std::memset(work_.clean_tile + kHalf, 0, kHalf * sizeof(BFloat16));
    return work_.clean_tile;
  }

  static RELAY_INLINE void finish_weights(Vec16 low, Vec16 high, float* sums, BFloat16* weights) {
    const __m512bh pairs = _mm512_cvtne2ps_pbh(high, low);
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    store16(sums, _mm512_dpbf16_ps(load16(sums), pairs, ones));
    _mm512_store_si512(weights, (__m512i)pairs);
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

  // The pipelined path. Each part of a unit runs the products of its own keys, the weights of the
  // part before it, and the products of the values of the unit before.
  void push(Pipeline& pipeline, const RowTile& tile, const KvRow& kv, int begin, int end,
            const Prefetch& prefetch) {
    const Unit unit{tile, &kv, begin, end, pipeline.next_buffer};
    pipeline.next_buffer ^= 1;
    const int value_parts = (dim_groups_ + 1) / 2;
    // The weights of `pipeline.values` are complete once this unit's first part has run.
    for (int part = 0; part < unit.score_parts(); ++part) {
      prefetch.some(part, unit.score_parts());
      const bool multiply_values = pipeline.has_values && part > 0;
      const int spread = unit.score_parts() - 1;
      const int first = spread ? value_parts * (part - 1) / spread : 0;
      const int last = spread ? value_parts * part / spread : 0;
      run_part(pipeline, &unit, part, multiply_values ? first : 0, multiply_values ? last : 0);
    }
    if (pipeline.has_values && unit.score_parts() == 1)
      run_part(pipeline, nullptr, 0, 0, value_parts);
    pipeline.values = unit;
    pipeline.has_values = true;
  }

  void drain(Pipeline& pipeline) {
    if (!pipeline.has_values) return;
    run_part(pipeline, nullptr, 0, 0, 0);
    run_part(pipeline, nullptr, 0, 0, (dim_groups_ + 1) / 2);
    pipeline.has_values = false;
  }

  // Products of part `part` of `unit`'s keys (unless null) and of dim group pairs
  // [first_pair, last_pair) of the pending unit's values, with the pending weights in between.
  void run_part(Pipeline& pipeline, const Unit* unit, int part, int first_pair, int last_pair) {
    WeightRows rows(pipeline, work_);
    const auto between = [&] { rows.next(); };
    const int to = pipeline.score_buffer ^ 1;
    if (unit) {
      for (int t = 0; t < kScoreTiles; ++t)
        multiply_key_tile(unit->tile, *unit->kv,
                          unit->begin + part * kScoreTokens + t * kTileTokens, true,
                          work_.scores[to] + t * kScoreFloats, between);
    }
    for (int pair = first_pair; pair < last_pair; ++pair)
      multiply_value_pair(pipeline.values, pair, between);
    rows.rest();
    pipeline.has_scores = unit != nullptr;
    if (unit) {
      pipeline.scores = *unit;
      pipeline.score_part = part;
      pipeline.score_buffer = to;
    }
  }

  // Weights of the 32 rows of four score tiles, one row of one tile a call.
  class WeightRows {
   public:
    WeightRows(const Pipeline& pipeline, Workspace& work) {
      if (!pipeline.has_scores) return;
      const RowTile& tile = pipeline.scores.tile;
      remaining_ = kScoreTiles * kRows;
      scale_ = set16(pipeline.to_log2);
      scores_ = work.scores[pipeline.score_buffer];
      weights_ =
          work.weights[pipeline.scores.buffer] + weight_at(pipeline.score_part * kScoreTiles, 0);
      sums_ = tile.sums;
      references_ = tile.references;
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

  template <class F>
  RELAY_INLINE void multiply_value_pair(const Unit& unit, int pair, F between) {
    const RowTile& tile = unit.tile;
    const int group = pair * 2;
    const bool two = group + 1 < dim_groups_;
    float* out0 = tile.outputs + group * tile.group_stride;
    float* out1 = out0 + tile.group_stride;
    const int high = kTileRows * kLanes;
    tile_load<0>(out0, kTileRowBytes);
    tile_load<2>(out0 + high, kTileRowBytes);
    if (two) {
      tile_load<1>(out1, kTileRowBytes);
      tile_load<3>(out1 + high, kTileRowBytes);
    }
    const BFloat16* weights = work_.weights[unit.buffer];
    const int64_t group_elements = int64_t{unit.kv->block_size} * kLanes;
    for (int token = unit.begin; token < unit.end; token += kTileTokens) {
      const BFloat16* values =
          static_cast<const BFloat16*>(unit.kv->value_line(token, group, sizeof(BFloat16)));
      tile_load<4>(weights, kTileRowBytes);
      tile_load<6>(values, kTileRowBytes);
      tile_multiply<0, 4, 6>();
      between();
      tile_load<5>(weights + kWeightTile, kTileRowBytes);
      tile_multiply<2, 5, 6>();
      between();
      if (two) {
        tile_load<7>(values + group_elements, kTileRowBytes);
        tile_multiply<1, 4, 7>();
        between();
        tile_multiply<3, 5, 7>();
        between();
      }
      weights += 2 * kWeightTile;
    }
    tile_store<0>(out0, kTileRowBytes);
    tile_store<2>(out0 + high, kTileRowBytes);
    if (two) {
      tile_store<1>(out1, kTileRowBytes);
      tile_store<3>(out1 + high, kTileRowBytes);
    }
  }

  const int head_size_, query_stride_, dim_groups_;
  Workspace& work_;
  BFloat16* queries_;
};

}  // namespace
}  // namespace relay

// SPDX-License-Identifier: Apache-2.0
// Products of 32 rows with keys and values in tile registers. Every product ends with a call of
// `between`: the vector units have time for other work while the tile unit is busy.
#pragma once

#include "kv_row.h"
#include "problem.h"
#include "row_state.h"
#include "tile_registers.h"
#include "weights.h"

namespace relay {
namespace {

constexpr int kRows = 32;            // of a row tile: two tile registers
constexpr int kScoreTokens = 128;    // of one part of the keys: four 32 x 32 score tiles
constexpr int kUnitTokens = 512;     // between loads and stores of the running outputs
constexpr int kFewRowsTokens = 128;  // the same where memory limits: keys and values in their order
constexpr int kGroupsPerPage = 4;    // of values, in blocks of 32 tokens
constexpr int kStepDims = 32;        // summed by one tile product of queries and keys
constexpr int kScoreTiles = kScoreTokens / kTileTokens;
constexpr int kUnitTiles = kUnitTokens / kTileTokens;
constexpr int kScoreFloats = kRows * kTileTokens;
constexpr int kWeightTile = kTileRows * kTileTokens;  // bf16 elements of a 16-row weight tile

// 32 rows of states and queries, in place or staged.
struct RowTile {
  const BFloat16* queries;  // padded to whole steps of dims
  float* outputs;           // 16 floats a row, group_stride from one dim group to the next
  int64_t group_stride;
  float* sums;
  float* references;
  const RowRange* ranges;
  int live;  // rows that exist

  bool high() const { return live > kTileRows; }  // the second tile register is needed
  int low_rows() const { return high() ? kTileRows : live; }
};

// Where the weights of `row` for 32 tokens are in [tile][row half][row][token].
constexpr int weight_at(int tile, int row) { return tile * 2 * kWeightTile + row * kTileTokens; }

// Where the keys and values of a product are: in memory, or in the processor's cache, as another
// row tile was multiplied with them just before.
enum class From { kMemory, kCache };

// Asks for the beginning of what is loaded after this: processors that read ahead stop at the end
// of a page, and what a head has of a block is a few pages.
RELAY_INLINE void ask_for(const void* line) { __builtin_prefetch(line, 0, 2); }

// Keys and values without what belongs to others.
struct CleanTiles {
  alignas(64) BFloat16 keys[kTileRows * 32];
  alignas(64) BFloat16 values[2][256 / kLanes][kTileRows * 32];  // of a first and a last tile
};

class TileProducts {
 public:
  static int padded_head_size(int head_size) {
    return (head_size + kStepDims - 1) / kStepDims * kStepDims;
  }
  TileProducts(int head_size, CleanTiles& clean)
      : head_size_(head_size),
        query_stride_(padded_head_size(head_size)),
        dim_groups_(head_size / kLanes),
        clean_(clean) {}

  int query_stride() const { return query_stride_; }
  int dim_groups() const { return dim_groups_; }

  // The scores of the low rows, and of the high ones if `high`, with 32 tokens: [row][token]. Those
  // of the last 16 tokens are zeros unless `both_groups`.
  template <class F>
  RELAY_INLINE void multiply_keys(const RowTile& tile, const KvRow& kv, From where, int token,
                                  bool high, bool both_groups, float* scores, F between) const {
    const int64_t query_bytes = query_stride_ * int64_t{sizeof(BFloat16)};
    const BFloat16* low_queries = tile.queries;
    const BFloat16* high_queries = tile.queries + kTileRows * query_stride_;
    const BFloat16* k0 = static_cast<const BFloat16*>(kv.key_group(token));
    const BFloat16* k1 = k0 + kLanes * head_size_;
    if (where == From::kMemory && token + kTileTokens < kv.end_token) {
      const BFloat16* next = static_cast<const BFloat16*>(kv.key_group(token + kTileTokens));
      ask_for(next);
      ask_for(next + kLanes * head_size_);
    }
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
      if (!both_groups) continue;
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

  // Adds weights x values of dim groups `group` and `group` + 1, of whole tiles of tokens that
  // every row sees, to the outputs.
  template <class F>
  RELAY_INLINE void multiply_value_pair(const RowTile& tile, const BFloat16* weights,
                                        const KvRow& kv, From where, int begin, int end, int group,
                                        F between) const {
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
    const int64_t group_elements = int64_t{kv.block_size} * kLanes;
    for (int token = begin; token < end;) {
      const BFloat16* values = values_of(kv, where, token, group, 2, begin, end);
      const int block_end = kv.block_end(token) < end ? kv.block_end(token) : end;
      for (; token < block_end; token += kTileTokens) {
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
        values += kTileTokens * kLanes;
      }
    }
    tile_store<0>(out0, kTileRowBytes);
    tile_store<2>(out0 + high, kTileRowBytes);
    if (two) {
      tile_store<1>(out1, kTileRowBytes);
      tile_store<3>(out1 + high, kTileRowBytes);
    }
  }

  // The same for some dim groups; values outside [visible_begin, visible_end) count as zeros, for
  // 0 * NaN is NaN.
  void multiply_visible_values(const RowTile& tile, const BFloat16* weights, const KvRow& kv,
                               From where, int visible_begin, int visible_end,
                               DimGroups groups) const {
    const int first = visible_begin / kTileTokens * kTileTokens;
    const int last = (visible_end - 1) / kTileTokens * kTileTokens;
    const bool cut_first = visible_begin > first;
    const bool cut_last = visible_end < last + kTileTokens && (last > first || !cut_first);
    for (int g = groups.first; g < groups.last; ++g) {
      if (cut_first) clean_values(kv, first, visible_begin, visible_end, g, clean_.values[0][g]);
      if (cut_last) clean_values(kv, last, visible_begin, visible_end, g, clean_.values[1][g]);
    }
    const bool high = tile.high();
    for (int g = groups.first; g < groups.last; ++g) {
      float* low_outputs = tile.outputs + g * tile.group_stride;
      float* high_outputs = low_outputs + kTileRows * kLanes;
      tile_load<0>(low_outputs, kTileRowBytes);
      if (high) tile_load<2>(high_outputs, kTileRowBytes);
      const BFloat16* tile_weights = weights;
      for (int token = first; token < visible_end;) {
        const BFloat16* values = values_of(kv, where, token, g, 1, first, visible_end);
        const int block_end = kv.block_end(token) < visible_end ? kv.block_end(token) : visible_end;
        for (; token < block_end; token += kTileTokens) {
          const BFloat16* from = cut_first && token == first ? clean_.values[0][g]
                                 : cut_last && token == last ? clean_.values[1][g]
                                                             : values;
          tile_load<6>(from, kTileRowBytes);
          tile_load<4>(tile_weights, kTileRowBytes);
          tile_multiply<0, 4, 6>();
          if (high) {
            tile_load<5>(tile_weights + kWeightTile, kTileRowBytes);
            tile_multiply<2, 5, 6>();
          }
          tile_weights += 2 * kWeightTile;
          values += kTileTokens * kLanes;
        }
      }
      tile_store<0>(low_outputs, kTileRowBytes);
      if (high) tile_store<2>(high_outputs, kTileRowBytes);
    }
  }

  static void ask_for_values(const KvRow& kv, int token, int end, int groups) {
    for (int g = 0; g < groups; ++g) {
      const char* line = static_cast<const char*>(kv.value_line(token, g));
      for (int at = token; at < end; at += 2, line += kTileRowBytes) ask_for(line);
    }
  }

 private:
  // The last 16 dims of a head size that is not a multiple of 32; what follows them in memory
  // belongs to other tokens.
  const BFloat16* clean_keys(const BFloat16* keys) const {
    constexpr int kHalf = kTileRows * 32 / 2;
    std::memcpy(clean_.keys, keys, kHalf * sizeof(BFloat16));
    std::memset(clean_.keys + kHalf, 0, kHalf * sizeof(BFloat16));
    return clean_.keys;
  }

  // The values from `token` on of dim group `group`; asks for those that are read after this
  // block's: the next block's of the same `groups` groups, or else the first one's of the groups
  // after them.
  RELAY_INLINE const BFloat16* values_of(const KvRow& kv, From where, int token, int group,
                                         int groups, int begin, int end) const {
    if (where == From::kMemory) {
      const bool more = kv.block_end(token) < end;
      const int next = more ? kv.block_end(token) : begin, first = more ? group : group + groups;
      for (int g = first; g < first + groups && g < dim_groups_; ++g)
        ask_for(kv.value_line(next, g));
    }
    return static_cast<const BFloat16*>(kv.value_line(token, group));
  }

  // 32 tokens x 16 dims from `token` on, pairs of tokens side by side, with zeros for those outside
  // [begin, end), which are not read.
  static void clean_values(const KvRow& kv, int token, int begin, int end, int group,
                           BFloat16* clean) {
    const __m512i* values = static_cast<const __m512i*>(kv.value_line(token, group));
    __m512i* to = reinterpret_cast<__m512i*>(clean);
    const int first = std::max(begin - token, 0), last = std::min(end - token, kTileTokens);
    int pair = 0;
    for (; pair < first / 2; ++pair) _mm512_store_si512(to + pair, _mm512_setzero_si512());
    for (; 2 * pair < last; ++pair)
      _mm512_store_si512(to + pair, _mm512_loadu_si512(values + pair));
    for (; pair < kTileRows; ++pair) _mm512_store_si512(to + pair, _mm512_setzero_si512());
    const auto keep = [&](int at, int bits) {
      _mm512_store_si512(to + at,
                         _mm512_and_si512(_mm512_load_si512(to + at), _mm512_set1_epi32(bits)));
    };
    if (first % 2) keep(first / 2, static_cast<int>(0xffff0000u));
    if (last % 2) keep(last / 2, 0xffff);
  }

  const int head_size_, query_stride_, dim_groups_;
  CleanTiles& clean_;
};

}  // namespace
}  // namespace relay

// SPDX-License-Identifier: Apache-2.0
// From raw scores q.k of one row to weights 2^(score - R), in one pass and without a running
// maximum.
#pragma once

#include <cstring>

#include "multiply.h"
#include "problem.h"
#include "row_state.h"

namespace relay {
namespace {

// What turns a raw score into units of log2; shared by all rows but for ALiBi's slope.
struct ScoreScale {
  float to_log2;   // scale * log2(e)
  float scale;     // used with a soft cap only
  float soft_cap;  // 0: none
};

struct RowRange {
  int begin_token, end_token;  // visible KV tokens
  float slope_log2;            // ALiBi slope * log2(e)
};

// What a kernel does with the tokens it is given.
enum class Pass {
  kFold,
  kScores,  // stores raw scores
  kValues,  // folds stored weights, for some of the dims
};

// Raw scores, and later the weights that they become, in memory.
struct Stored {
  float* begin;      // row after row, from first_token on
  int64_t row_size;  // of one row
  int first_token;

  RELAY_INLINE float* at(int row, int token) const {
    return begin + row * row_size + (token - first_token);
  }
};

struct DimGroups {  // of 16 dims
  int first, last;
};

template <bool Features>
RELAY_INLINE Vec16 log2_scores(Vec16 raw, int token, const ScoreScale& scale,
                               const RowRange& range) {
  if constexpr (!Features) {
    return raw * set16(scale.to_log2);
  } else {
    Vec16 x = raw * set16(scale.to_log2);
    if (scale.soft_cap != 0.f) {
      const float cap = scale.soft_cap;
      x = tanh16(raw * set16(scale.scale / cap)) * set16(cap * kLog2E);
    }
    const float distance = static_cast<float>(token - (range.end_token - 1));
    return fma16(set16(range.slope_log2), lane_index16() + set16(distance), x);
  }
}

// The largest visible score of tokens [first_token, first_token + 16 * groups), rounded up.
template <bool Features>
float ceil_of_largest(const float* scores, int first_token, int groups, const ScoreScale& scale,
                      const RowRange& range) {
  Vec16 largest = set16(kUnset);
  for (int g = 0; g < groups; ++g) {
    const int token = first_token + g * kLanes;
    const Vec16 x = log2_scores<Features>(load16(scores + g * kLanes), token, scale, range);
    const Mask16 visible = lanes16(range.begin_token - token, range.end_token - token);
    largest = max16(largest, select16(visible, x, set16(kUnset)));
  }
  return std::ceil(max_of16(largest));
}

// A reference must be finite: infinite or undefined scores end as NaN outputs, not as an endless
// search for a better reference.
[[maybe_unused]] float finite_reference(float reference) {
  return std::fabs(reference) <= kLargestReference ? reference : 0.f;
}

// The reference of a row that has none, for scores of tokens [begin, end): from the first tile of
// them in which it sees a token.
template <bool Features>
float first_reference(const float* scores, int begin, int end, const ScoreScale& scale,
                      const RowRange& range) {
  const int seen = range.begin_token > begin ? range.begin_token : begin;
  if (seen >= end || seen >= range.end_token) return kUnset;
  const int tile = seen / kTileTokens * kTileTokens;
  const int from = tile > begin ? tile : begin;
  const int to = tile + kTileTokens < end ? tile + kTileTokens : end;
  return finite_reference(ceil_of_largest<Features>(
      scores + (from - begin), from, (to - from + kLanes - 1) / kLanes, scale, range));
}

// Stores 16 weights as the products will read them; returns what they are then worth.
RELAY_INLINE Vec16 store_weights(float* weights, int64_t /*part_stride*/, Vec16 w) {
#if RELAY_BF16_PRODUCTS
  alignas(64) BFloat16 high[kLanes];
  if constexpr (OperandOf<BFloat16>::kWeightParts == 1) w = store_rounded16(high, w);
#endif
  store16(weights, w);
  return w;
}
#if RELAY_BF16_PRODUCTS
RELAY_INLINE Vec16 store_weights(BFloat16* weights, [[maybe_unused]] int64_t part_stride, Vec16 w) {
  const Vec16 high = store_rounded16(weights, w);
  if constexpr (OperandOf<BFloat16>::kWeightParts == 1) return high;
  store_rounded16(weights + part_stride, w - high);
  return w;
}

// Takes the low parts from 16 stored weights.
RELAY_INLINE void drop_low_parts(float* weights, int64_t /*part_stride*/) {
  alignas(64) BFloat16 high[kLanes];
  store16(weights, store_rounded16(high, load16(weights)));
}
RELAY_INLINE void drop_low_parts(BFloat16* weights, int64_t part_stride) {
  std::memset(weights + part_stride, 0, kLanes * sizeof(BFloat16));
}
#endif

// The low parts of a row's tile are dropped where its largest weight is at most this much of the
// row's largest partial sum (docs/kernels.md, 7).
constexpr float kNeedsNoLowParts = 0x1p-7f;

// Writes the weights of 16 * groups tokens and adds them to the row's 16 partial sums. `Parts` that
// products read of a weight, also if they are stored as float for now.
template <bool Features, bool Masked, int Parts, class W>
RELAY_INLINE void compute_weights(const float* scores, int first_token, int groups,
                                  const ScoreScale& scale, const RowRange& range, float reference,
                                  W* weights, int64_t part_stride, float* sums) {
  Vec16 sum = load16(sums);
  [[maybe_unused]] Vec16 largest = zero16();  // of the tile so far
  [[maybe_unused]] int first_of_tile = 0;
  for (int g = 0; g < groups; ++g) {
    const int token = first_token + g * kLanes;
    const Vec16 raw = load16(scores + g * kLanes);
    Vec16 w;
    if constexpr (Features)
      w = exp2_16(log2_scores<true>(raw, token, scale, range) - set16(reference));
    else
      w = exp2_16(fma16(raw, set16(scale.to_log2), set16(-reference)));
    if constexpr (Masked)
      w = select16(lanes16(range.begin_token - token, range.end_token - token), w, zero16());
    sum = sum + store_weights(weights + g * kLanes, part_stride, w);
    if constexpr (Parts == 2) {
      largest = max16(largest, w);
      if ((token + kLanes) % kTileTokens != 0 && g + 1 < groups) continue;
      const bool drop = all_at_most16(largest, kNeedsNoLowParts * max_of16(sum));
      for (int i = first_of_tile; drop && i <= g; ++i)
        drop_low_parts(weights + i * kLanes, part_stride);
      first_of_tile = g + 1;
      largest = zero16();
    }
  }
  store16(sums, sum);
}

// The tiles of a chunk of weights in which a row has low parts. Zeros are not worth their products:
// they change no output, so that which rows are looked at together changes none either.
template <int Parts>
class LowParts {  // of a kernel that has none
 public:
  RELAY_INLINE bool at(int /*token*/) const { return true; }
  RELAY_INLINE int same_until(int /*token*/, int end) const { return end; }
};

template <>
class LowParts<2> {
 public:
  template <class W>
  void find(const W* weights, int rows, int64_t row_stride, int64_t part_stride, int first_token,
            int groups) {
    tiles_ = 0;
    first_tile_ = first_token / kTileTokens;
    for (int g = 0; g < groups; ++g) {
      uint64_t bits = 0;
      for (int r = 0; r < rows; ++r) {
        uint64_t low[kLanes * sizeof(W) / sizeof(uint64_t)];
        std::memcpy(low, weights + r * row_stride + part_stride + g * kLanes, sizeof low);
        for (const uint64_t some : low) bits |= some;
      }
      if (bits != 0) tiles_ |= 1u << tile(first_token + g * kLanes);
    }
  }
  RELAY_INLINE bool at(int token) const { return tiles_ >> tile(token) & 1; }
  // Where the run of tiles ends that are as that of `token` is, at most `end`.
  RELAY_INLINE int same_until(int token, int end) const {
    int next = (token / kTileTokens + 1) * kTileTokens;
    while (next < end && at(next) == at(token)) next += kTileTokens;
    return next < end ? next : end;
  }

 private:
  RELAY_INLINE int tile(int token) const { return token / kTileTokens - first_tile_; }

  uint32_t tiles_ = 0;  // a bit for each
  int first_tile_ = 0;
};

}  // namespace
}  // namespace relay

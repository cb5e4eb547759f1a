// SPDX-License-Identifier: Apache-2.0
// Sixteen floats in two registers of AVX2.
#pragma once

#include <immintrin.h>

#include "../scalar.h"
#include "constants.h"

namespace relay {
namespace {

// What the functions below do to one register they do to both.
struct Vec16 {
  __m256 low, high;
};
using Mask16 = Vec16;

RELAY_INLINE Vec16 operator+(Vec16 a, Vec16 b) { return {a.low + b.low, a.high + b.high}; }
RELAY_INLINE Vec16 operator-(Vec16 a, Vec16 b) { return {a.low - b.low, a.high - b.high}; }
RELAY_INLINE Vec16 operator*(Vec16 a, Vec16 b) { return {a.low * b.low, a.high * b.high}; }
RELAY_INLINE Vec16 operator/(Vec16 a, Vec16 b) { return {a.low / b.low, a.high / b.high}; }

RELAY_INLINE Vec16 zero16() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
RELAY_INLINE Vec16 set16(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
RELAY_INLINE Vec16 load16(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
RELAY_INLINE void store16(float* p, Vec16 x) {
  _mm256_storeu_ps(p, x.low);
  _mm256_storeu_ps(p + 8, x.high);
}
RELAY_INLINE Vec16 fma16(Vec16 a, Vec16 b, Vec16 c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
RELAY_INLINE Vec16 max16(Vec16 a, Vec16 b) {
  return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}
RELAY_INLINE Vec16 lane_index16() {
  return {_mm256_set_ps(7, 6, 5, 4, 3, 2, 1, 0), _mm256_set_ps(15, 14, 13, 12, 11, 10, 9, 8)};
}
RELAY_INLINE float max_of16(Vec16 x) {
  const __m256 eight = _mm256_max_ps(x.low, x.high);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
RELAY_INLINE float sum_of16(Vec16 x) {
  const __m256 eight = x.low + x.high;
  __m128 four = _mm256_castps256_ps128(eight) + _mm256_extractf128_ps(eight, 1);
  four = four + _mm_movehl_ps(four, four);
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

// Lanes [begin, end).
RELAY_INLINE Mask16 lanes16(int begin, int end) {
  const Vec16 lane = lane_index16();
  const __m256 first = _mm256_set1_ps(float(begin)), last = _mm256_set1_ps(float(end));
  const auto within = [&](__m256 x) {
    return _mm256_and_ps(_mm256_cmp_ps(x, first, _CMP_GE_OQ), _mm256_cmp_ps(x, last, _CMP_LT_OQ));
  };
  return {within(lane.low), within(lane.high)};
}
RELAY_INLINE Vec16 select16(Mask16 mask, Vec16 a, Vec16 b) {
  return {_mm256_blendv_ps(b.low, a.low, mask.low), _mm256_blendv_ps(b.high, a.high, mask.high)};
}
RELAY_INLINE bool all_at_most16(Vec16 x, float bound) {
  const __m256 most = _mm256_set1_ps(bound);
  const __m256 at_most = _mm256_and_ps(_mm256_cmp_ps(x.low, most, _CMP_LE_OQ),
                                       _mm256_cmp_ps(x.high, most, _CMP_LE_OQ));
  return _mm256_movemask_ps(at_most) == 0xff;
}
RELAY_INLINE Vec16 abs16(Vec16 x) {
  const __m256 sign = _mm256_set1_ps(-0.f);
  return {_mm256_andnot_ps(sign, x.low), _mm256_andnot_ps(sign, x.high)};
}

template <int Terms>
RELAY_INLINE __m256 exp2_8(const float (&terms)[Terms], __m256 t) {
  // 2^129 is infinite and 2^-150 zero in float, as they should be; NaN passes through at the end.
  const __m256 bounded =
      _mm256_min_ps(_mm256_max_ps(t, _mm256_set1_ps(-150.f)), _mm256_set1_ps(129.f));
  const __m256 floor = _mm256_floor_ps(bounded), f = bounded - floor;
  __m256 p = _mm256_set1_ps(terms[Terms - 1]);
  for (int i = Terms - 2; i >= 0; --i) p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(terms[i]));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.f));
  // two factors, so that 2^n stays a normal float
  const __m256i n = _mm256_cvtps_epi32(floor), half = _mm256_srai_epi32(n, 1);
  const auto power = [](__m256i exponent) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_add_epi32(exponent, _mm256_set1_epi32(127)), 23));
  };
  p = p * power(half) * power(_mm256_sub_epi32(n, half));
  return _mm256_blendv_ps(p, t, _mm256_cmp_ps(t, t, _CMP_UNORD_Q));
}
template <int Terms>
RELAY_INLINE Vec16 exp2_by(const float (&terms)[Terms], Vec16 t) {
  return {exp2_8(terms, t.low), exp2_8(terms, t.high)};
}
RELAY_INLINE Vec16 distances16(const int32_t* p, int32_t origin) {
  const auto eight = [&](const int32_t* from) {
    const __m256i each = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(each, _mm256_set1_epi32(origin)));
  };
  return {eight(p), eight(p + 8)};
}

RELAY_INLINE Vec16 load_elements16(const float* p) { return load16(p); }
RELAY_INLINE Vec16 load_elements16(const Float16* p) {
  const __m128i* halves = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}
RELAY_INLINE void store_elements16(float* p, Vec16 x) { store16(p, x); }
RELAY_INLINE void store_elements16(Float16* p, Vec16 x) {
  __m128i* halves = reinterpret_cast<__m128i*>(p);
  _mm_storeu_si128(halves, _mm256_cvtps_ph(x.low, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(halves + 1, _mm256_cvtps_ph(x.high, _MM_FROUND_TO_NEAREST_INT));
}
RELAY_INLINE void store_elements16(BFloat16* p, Vec16 x) {
  float lanes[kLanes];
  store16(lanes, x);
  for (int i = 0; i < kLanes; ++i) from_float(lanes[i], p + i);
}
RELAY_INLINE void load_pairs16(const BFloat16* p, Vec16* even, Vec16* odd) {
  const __m256i* pairs = reinterpret_cast<const __m256i*>(p);
  const __m256i low = _mm256_loadu_si256(pairs), high = _mm256_loadu_si256(pairs + 1);
  const __m256i upper = _mm256_set1_epi32(int(0xffff0000u));
  *even = {_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)),
           _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))};
  *odd = {_mm256_castsi256_ps(_mm256_and_si256(low, upper)),
          _mm256_castsi256_ps(_mm256_and_si256(high, upper))};
}

}  // namespace
}  // namespace relay

// SPDX-License-Identifier: Apache-2.0
// Sixteen floats: an AVX-512 register, two of AVX2, or the compiler's own vector type anywhere
// else.
#pragma once

#include <cmath>

#include "scalar.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define RELAY_INLINE __attribute__((always_inline)) inline

namespace relay {
namespace {

constexpr int kLanes = 16;
constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kLn2 = 0.69314718055994530942f;

// 2^f for f in [0, 1) as 1 + f * (c1 + ... c5 f^4): relative error 8.3e-8, exact at 0.
constexpr float kExp2[5] = {0x1.62e4bap-1f, 0x1.ebdb56p-3f, 0x1.c91ce6p-5f, 0x1.277856p-7f,
                            0x1.e974fap-10f};
// The same with fewer terms: relative error 8.6e-5, exact at 0.
constexpr float kExp2Roughly[3] = {0x1.63e65ap-1f, 0x1.d23788p-3f, 0x1.3baaaap-4f};

#if defined(__AVX512F__)

using Vec16 = __m512;
using Mask16 = __mmask16;

RELAY_INLINE Vec16 zero16() { return _mm512_setzero_ps(); }
RELAY_INLINE Vec16 set16(float x) { return _mm512_set1_ps(x); }
RELAY_INLINE Vec16 load16(const float* p) { return _mm512_loadu_ps(p); }
RELAY_INLINE void store16(float* p, Vec16 x) { _mm512_storeu_ps(p, x); }
RELAY_INLINE Vec16 fma16(Vec16 a, Vec16 b, Vec16 c) { return _mm512_fmadd_ps(a, b, c); }
RELAY_INLINE Vec16 max16(Vec16 a, Vec16 b) { return _mm512_max_ps(a, b); }
RELAY_INLINE Vec16 lane_index16() {
  return _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
}
RELAY_INLINE float max_of16(Vec16 x) { return _mm512_reduce_max_ps(x); }
RELAY_INLINE float sum_of16(Vec16 x) { return _mm512_reduce_add_ps(x); }

// Lanes [begin, end).
RELAY_INLINE Mask16 lanes16(int begin, int end) {
  const uint32_t below_end = end >= kLanes ? 0xffffu : (end <= 0 ? 0u : (1u << end) - 1u);
  const uint32_t below_begin = begin >= kLanes ? 0xffffu : (begin <= 0 ? 0u : (1u << begin) - 1u);
  return static_cast<Mask16>(below_end & ~below_begin);
}
RELAY_INLINE Vec16 select16(Mask16 mask, Vec16 a, Vec16 b) {
  return _mm512_mask_blend_ps(mask, b, a);
}
RELAY_INLINE bool all_at_most16(Vec16 x, float bound) {
  return _mm512_cmp_ps_mask(x, _mm512_set1_ps(bound), _CMP_LE_OQ) == 0xffffu;
}
RELAY_INLINE Vec16 abs16(Vec16 x) { return _mm512_abs_ps(x); }

template <int Terms>
RELAY_INLINE Vec16 exp2_by(const float (&terms)[Terms], Vec16 t) {
  const Vec16 f = _mm512_reduce_ps(t, 0x9);  // t - floor(t)
  Vec16 p = _mm512_set1_ps(terms[Terms - 1]);
  for (int i = Terms - 2; i >= 0; --i) p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(terms[i]));
  return _mm512_scalef_ps(_mm512_fmadd_ps(p, f, _mm512_set1_ps(1.f)), t);
}

// Of whole numbers from `origin`.
RELAY_INLINE Vec16 distances16(const int32_t* p, int32_t origin) {
  return _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_loadu_si512(p), _mm512_set1_epi32(origin)));
}

RELAY_INLINE Vec16 load_elements16(const float* p) { return _mm512_loadu_ps(p); }
RELAY_INLINE Vec16 load_elements16(const Float16* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
RELAY_INLINE void store_elements16(float* p, Vec16 x) { _mm512_storeu_ps(p, x); }
RELAY_INLINE void store_elements16(Float16* p, Vec16 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
RELAY_INLINE void store_elements16(BFloat16* p, Vec16 x) {
  const __m512i bits = _mm512_castps_si512(x), high = _mm512_srli_epi32(bits, 16);
  const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(
      _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __m512i quiet_nan = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(is_nan, rounded, quiet_nan)));
}
// The even and odd elements of 32 bf16 values.
RELAY_INLINE void load_pairs16(const BFloat16* p, Vec16* even, Vec16* odd) {
  const __m512i pairs = _mm512_loadu_si512(p);
  *even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  *odd = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000u))));
}

#elif defined(__AVX2__)

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

#else

typedef float Vec16 __attribute__((vector_size(64)));
typedef int32_t Mask16 __attribute__((vector_size(64)));
typedef uint32_t Bits16 __attribute__((vector_size(64)));

RELAY_INLINE Vec16 zero16() { return Vec16{}; }
RELAY_INLINE Vec16 set16(float x) { return Vec16{} + x; }
RELAY_INLINE Vec16 load16(const float* p) {
  Vec16 x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
RELAY_INLINE void store16(float* p, Vec16 x) { std::memcpy(p, &x, sizeof x); }
RELAY_INLINE Vec16 fma16(Vec16 a, Vec16 b, Vec16 c) { return a * b + c; }
RELAY_INLINE Vec16 max16(Vec16 a, Vec16 b) { return a > b ? a : b; }
RELAY_INLINE Vec16 lane_index16() {
  return Vec16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
}
RELAY_INLINE float max_of16(Vec16 x) {
  float m = x[0];
  for (int i = 1; i < kLanes; ++i) m = m > x[i] ? m : x[i];
  return m;
}
RELAY_INLINE float sum_of16(Vec16 x) {
  float parts[8];
  for (int i = 0; i < 8; ++i) parts[i] = x[i] + x[i + 8];
  for (int width = 4; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) parts[i] += parts[i + width];
  return parts[0];
}
RELAY_INLINE Mask16 lanes16(int begin, int end) {
  const Mask16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return (lane >= begin) & (lane < end);
}
RELAY_INLINE Vec16 select16(Mask16 mask, Vec16 a, Vec16 b) { return mask ? a : b; }
RELAY_INLINE bool all_at_most16(Vec16 x, float bound) {
  const Mask16 at_most = x <= set16(bound);
  bool all = true;
  for (int i = 0; i < kLanes; ++i) all &= at_most[i] != 0;
  return all;
}
RELAY_INLINE Vec16 abs16(Vec16 x) { return x < zero16() ? -x : x; }

template <int Terms>
RELAY_INLINE Vec16 exp2_by(const float (&terms)[Terms], Vec16 t) {
  // 2^129 is infinite and 2^-150 zero in float, as they should be; NaN passes through at the end.
  Vec16 bounded = t < -150.f ? set16(-150.f) : t;
  bounded = bounded > 129.f ? set16(129.f) : bounded;
  bounded = bounded == bounded ? bounded : zero16();
  Mask16 n = __builtin_convertvector(bounded, Mask16);
  n += __builtin_convertvector(n, Vec16) > bounded;  // truncation to floor: a true lane is -1
  const Vec16 f = bounded - __builtin_convertvector(n, Vec16);
  Vec16 p = set16(terms[Terms - 1]);
  for (int i = Terms - 2; i >= 0; --i) p = p * f + terms[i];
  p = p * f + 1.f;
  const Mask16 half = n >> 1;  // two factors, so that 2^n stays a normal float
  const Bits16 low = (Bits16)((half + 127) << 23), high = (Bits16)((n - half + 127) << 23);
  p = p * (Vec16)low * (Vec16)high;
  return t == t ? p : t;
}
RELAY_INLINE Vec16 distances16(const int32_t* p, int32_t origin) {
  Vec16 x;
  for (int i = 0; i < kLanes; ++i) x[i] = static_cast<float>(p[i] - origin);
  return x;
}

RELAY_INLINE Vec16 load_elements16(const float* p) { return load16(p); }
RELAY_INLINE void store_elements16(float* p, Vec16 x) { store16(p, x); }
RELAY_INLINE Vec16 load_elements16(const Float16* p) {
  Vec16 x;
  for (int i = 0; i < kLanes; ++i) x[i] = to_float(p[i]);
  return x;
}
RELAY_INLINE void store_elements16(Float16* p, Vec16 x) {
  for (int i = 0; i < kLanes; ++i) from_float(x[i], p + i);
}
RELAY_INLINE void store_elements16(BFloat16* p, Vec16 x) {
  for (int i = 0; i < kLanes; ++i) from_float(x[i], p + i);
}
RELAY_INLINE void load_pairs16(const BFloat16* p, Vec16* even, Vec16* odd) {
  Bits16 pairs;
  std::memcpy(&pairs, p, sizeof pairs);
  *even = (Vec16)(pairs << 16);
  *odd = (Vec16)(pairs & 0xffff0000u);
}

#endif

RELAY_INLINE Vec16 exp2_16(Vec16 t) { return exp2_by(kExp2, t); }
RELAY_INLINE Vec16 exp2_roughly16(Vec16 t) { return exp2_by(kExp2Roughly, t); }

// tanh(x) = 1 - 2 / (1 + e^(2x)); e^(2x) may overflow to infinity or vanish.
RELAY_INLINE Vec16 tanh16(Vec16 x) {
  const Vec16 e = exp2_16(x * set16(2.f * kLog2E));
  return set16(1.f) - set16(2.f) / (set16(1.f) + e);
}

}  // namespace
}  // namespace relay

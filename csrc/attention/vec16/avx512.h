// SPDX-License-Identifier: Apache-2.0
// Sixteen floats in a register of AVX-512.
#pragma once

#include <immintrin.h>

#include "../scalar.h"
#include "constants.h"

namespace relay {
namespace {

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
RELAY_INLINE __m256i round_to_bf16(Vec16 x) {
  const __m512i bits = _mm512_castps_si512(x), high = _mm512_srli_epi32(bits, 16);
  const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(
      _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __m512i quiet_nan = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(is_nan, rounded, quiet_nan));
}
RELAY_INLINE void store_elements16(BFloat16* p, Vec16 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), round_to_bf16(x));
}
// The even and odd elements of 32 bf16 values.
RELAY_INLINE void load_pairs16(const BFloat16* p, Vec16* even, Vec16* odd) {
  const __m512i pairs = _mm512_loadu_si512(p);
  *even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  *odd = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000u))));
}

}  // namespace
}  // namespace relay

// SPDX-License-Identifier: Apache-2.0
// Products of bf16 pairs, where the machine has them: 16 lanes, each of the sum of two products.
#pragma once

#include "vec16.h"

#if defined(__AVX512BF16__)
#define RELAY_BF16_PRODUCTS 1
#elif defined(RELAY_NEON) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define RELAY_BF16_PRODUCTS 1
#else
#define RELAY_BF16_PRODUCTS 0
#endif

namespace relay {
namespace {

enum class Pair { kBoth, kFirstOnly, kSecondOnly };  // which tokens of a line are real

[[maybe_unused]] constexpr uint32_t kept_bits(Pair pair) {
  return pair == Pair::kBoth ? 0xffffffffu : pair == Pair::kFirstOnly ? 0xffffu : 0xffff0000u;
}

#if defined(__AVX512BF16__)

using Pairs16 = __m512bh;

RELAY_INLINE Pairs16 load_line16(const BFloat16* p, Pair pair) {
  __m512i bits = _mm512_loadu_si512(p);
  if (pair != Pair::kBoth) bits = _mm512_and_si512(bits, _mm512_set1_epi32(int(kept_bits(pair))));
  return (__m512bh)bits;
}
RELAY_INLINE Pairs16 broadcast_pair16(const BFloat16* p) {
  int pair;
  std::memcpy(&pair, p, sizeof pair);
  return (__m512bh)_mm512_set1_epi32(pair);
}
RELAY_INLINE Vec16 add_products16(Vec16 acc, Pairs16 a, Pairs16 b) {
  return _mm512_dpbf16_ps(acc, a, b);
}
// Stores x rounded to bf16; returns what was stored.
RELAY_INLINE Vec16 store_rounded16(BFloat16* p, Vec16 x) {
  const __m256bh rounded = _mm512_cvtneps_pbh(x);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)rounded);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)rounded), 16));
}

#elif RELAY_BF16_PRODUCTS

struct Pairs16 {
  bfloat16x8_t q[4];
};

RELAY_INLINE Pairs16 load_line16(const BFloat16* p, Pair pair) {
  Pairs16 line;
  for (int i = 0; i < 4; ++i) {
    uint16x8_t bits = vld1q_u16(&p[8 * i].bits);
    if (pair != Pair::kBoth)
      bits = vandq_u16(bits, vreinterpretq_u16_u32(vdupq_n_u32(kept_bits(pair))));
    line.q[i] = vreinterpretq_bf16_u16(bits);
  }
  return line;
}
RELAY_INLINE Pairs16 broadcast_pair16(const BFloat16* p) {
  uint32_t pair;
  std::memcpy(&pair, p, sizeof pair);
  const bfloat16x8_t eight = vreinterpretq_bf16_u32(vdupq_n_u32(pair));
  return {{eight, eight, eight, eight}};
}
RELAY_INLINE Vec16 add_products16(Vec16 acc, Pairs16 a, Pairs16 b) {
  return quarters16([&](int i) { return vbfdotq_f32(acc.q[i], a.q[i], b.q[i]); });
}
// Stores x rounded to bf16; returns what was stored.
RELAY_INLINE Vec16 store_rounded16(BFloat16* p, Vec16 x) {
  return quarters16([&](int i) {
    const bfloat16x4_t rounded = vcvt_bf16_f32(x.q[i]);
    vst1_u16(&p[4 * i].bits, vreinterpret_u16_bf16(rounded));
    return vcvt_f32_bf16(rounded);
  });
}

#endif

}  // namespace
}  // namespace relay

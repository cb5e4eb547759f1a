// SPDX-License-Identifier: Apache-2.0
// Sixteen floats in four registers of NEON, as every aarch64 CPU has it.
#pragma once

#include <arm_neon.h>

#include "../scalar.h"
#include "constants.h"

namespace relay {
namespace {

// What the functions below do to one register they do to all four.
struct Vec16 {
  float32x4_t q[4];
};
struct Mask16 {
  uint32x4_t q[4];
};

template <class F>
RELAY_INLINE Vec16 quarters16(F f) {
  return {{f(0), f(1), f(2), f(3)}};
}

RELAY_INLINE Vec16 operator+(Vec16 a, Vec16 b) {
  return quarters16([&](int i) { return vaddq_f32(a.q[i], b.q[i]); });
}
RELAY_INLINE Vec16 operator-(Vec16 a, Vec16 b) {
  return quarters16([&](int i) { return vsubq_f32(a.q[i], b.q[i]); });
}
RELAY_INLINE Vec16 operator*(Vec16 a, Vec16 b) {
  return quarters16([&](int i) { return vmulq_f32(a.q[i], b.q[i]); });
}
RELAY_INLINE Vec16 operator/(Vec16 a, Vec16 b) {
  return quarters16([&](int i) { return vdivq_f32(a.q[i], b.q[i]); });
}

RELAY_INLINE Vec16 set16(float x) {
  return quarters16([&](int) { return vdupq_n_f32(x); });
}
RELAY_INLINE Vec16 zero16() { return set16(0.f); }
RELAY_INLINE Vec16 load16(const float* p) {
  return quarters16([&](int i) { return vld1q_f32(p + 4 * i); });
}
RELAY_INLINE void store16(float* p, Vec16 x) {
  for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, x.q[i]);
}
RELAY_INLINE Vec16 fma16(Vec16 a, Vec16 b, Vec16 c) {
  return quarters16([&](int i) { return vfmaq_f32(c.q[i], a.q[i], b.q[i]); });
}
// b where one of both is NaN, as on x86.
RELAY_INLINE Vec16 max16(Vec16 a, Vec16 b) {
  return quarters16([&](int i) { return vbslq_f32(vcgtq_f32(a.q[i], b.q[i]), a.q[i], b.q[i]); });
}
RELAY_INLINE Vec16 lane_index16() {
  static constexpr float kIndices[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load16(kIndices);
}
RELAY_INLINE float max_of16(Vec16 x) {
  return vmaxvq_f32(vmaxq_f32(vmaxq_f32(x.q[0], x.q[1]), vmaxq_f32(x.q[2], x.q[3])));
}
RELAY_INLINE float sum_of16(Vec16 x) {
  const float32x4_t four = vaddq_f32(vaddq_f32(x.q[0], x.q[2]), vaddq_f32(x.q[1], x.q[3]));
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}

// Lanes [begin, end).
RELAY_INLINE Mask16 lanes16(int begin, int end) {
  const Vec16 lane = lane_index16();
  const float32x4_t first = vdupq_n_f32(float(begin)), last = vdupq_n_f32(float(end));
  Mask16 mask;
  for (int i = 0; i < 4; ++i)
    mask.q[i] = vandq_u32(vcgeq_f32(lane.q[i], first), vcltq_f32(lane.q[i], last));
  return mask;
}
RELAY_INLINE Vec16 select16(Mask16 mask, Vec16 a, Vec16 b) {
  return quarters16([&](int i) { return vbslq_f32(mask.q[i], a.q[i], b.q[i]); });
}
RELAY_INLINE bool all_at_most16(Vec16 x, float bound) {
  const float32x4_t most = vdupq_n_f32(bound);
  uint32x4_t at_most = vcleq_f32(x.q[0], most);
  for (int i = 1; i < 4; ++i) at_most = vandq_u32(at_most, vcleq_f32(x.q[i], most));
  return vminvq_u32(at_most) != 0;
}
RELAY_INLINE Vec16 abs16(Vec16 x) {
  return quarters16([&](int i) { return vabsq_f32(x.q[i]); });
}

template <int Terms>
RELAY_INLINE float32x4_t exp2_4(const float (&terms)[Terms], float32x4_t t) {
  // 2^129 is infinite and 2^-150 zero in float, as they should be; NaN passes through.
  const float32x4_t bounded = vminq_f32(vmaxq_f32(t, vdupq_n_f32(-150.f)), vdupq_n_f32(129.f));
  const float32x4_t floor = vrndmq_f32(bounded), f = vsubq_f32(bounded, floor);
  float32x4_t p = vdupq_n_f32(terms[Terms - 1]);
  for (int i = Terms - 2; i >= 0; --i) p = vfmaq_f32(vdupq_n_f32(terms[i]), p, f);
  p = vfmaq_f32(vdupq_n_f32(1.f), p, f);
  // two factors, so that 2^n stays a normal float
  const int32x4_t n = vcvtq_s32_f32(floor), half = vshrq_n_s32(n, 1);
  const auto power = [](int32x4_t exponent) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(exponent, vdupq_n_s32(127)), 23));
  };
  return vmulq_f32(vmulq_f32(p, power(half)), power(vsubq_s32(n, half)));
}
template <int Terms>
RELAY_INLINE Vec16 exp2_by(const float (&terms)[Terms], Vec16 t) {
  return quarters16([&](int i) { return exp2_4(terms, t.q[i]); });
}

// Of whole numbers from `origin`.
RELAY_INLINE Vec16 distances16(const int32_t* p, int32_t origin) {
  return quarters16(
      [&](int i) { return vcvtq_f32_s32(vsubq_s32(vld1q_s32(p + 4 * i), vdupq_n_s32(origin))); });
}

RELAY_INLINE Vec16 load_elements16(const float* p) { return load16(p); }
RELAY_INLINE Vec16 load_elements16(const Float16* p) {
  return quarters16(
      [&](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p[4 * i].bits))); });
}
RELAY_INLINE void store_elements16(float* p, Vec16 x) { store16(p, x); }
RELAY_INLINE void store_elements16(Float16* p, Vec16 x) {
  for (int i = 0; i < 4; ++i) vst1_u16(&p[4 * i].bits, vreinterpret_u16_f16(vcvt_f16_f32(x.q[i])));
}
RELAY_INLINE void store_elements16(BFloat16* p, Vec16 x) {
  for (int i = 0; i < 4; ++i) {
    const uint32x4_t bits = vreinterpretq_u32_f32(x.q[i]), high = vshrq_n_u32(bits, 16);
    const uint32x4_t odd = vandq_u32(high, vdupq_n_u32(1));
    const uint32x4_t rounded =
        vshrq_n_u32(vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16);
    const uint32x4_t quiet_nan = vorrq_u32(high, vdupq_n_u32(0x40));
    const uint32x4_t is_number = vceqq_f32(x.q[i], x.q[i]);
    vst1_u16(&p[4 * i].bits, vmovn_u32(vbslq_u32(is_number, rounded, quiet_nan)));
  }
}
// The even and odd elements of 32 bf16 values.
RELAY_INLINE void load_pairs16(const BFloat16* p, Vec16* even, Vec16* odd) {
  for (int i = 0; i < 4; ++i) {
    const uint32x4_t pairs = vreinterpretq_u32_u16(vld1q_u16(&p[8 * i].bits));
    even->q[i] = vreinterpretq_f32_u32(vshlq_n_u32(pairs, 16));
    odd->q[i] = vreinterpretq_f32_u32(vandq_u32(pairs, vdupq_n_u32(0xffff0000u)));
  }
}

}  // namespace
}  // namespace relay

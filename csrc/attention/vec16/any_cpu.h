// SPDX-License-Identifier: Apache-2.0
// Sixteen floats in the compiler's own vector type.
#pragma once

#include "../scalar.h"
#include "constants.h"

namespace relay {
namespace {

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

}  // namespace
}  // namespace relay

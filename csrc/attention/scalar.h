// SPDX-License-Identifier: Apache-2.0
// The element types of a KV cache, and how one element becomes a float and back (round to nearest
// even). Everything the kernels include is in an unnamed namespace: each translation unit is
// compiled for its own instruction set and must not share code with another.
#pragma once

#include <cstdint>
#include <cstring>

namespace relay {
namespace {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
struct Float8 {  // e4m3: no infinities, and all but the sign set is NaN
  uint8_t bits;
};

[[maybe_unused]] inline uint32_t float_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

[[maybe_unused]] inline float bits_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

[[maybe_unused]] inline float to_float(float x) { return x; }

[[maybe_unused]] inline float to_float(BFloat16 x) { return bits_float(uint32_t{x.bits} << 16); }

[[maybe_unused]] inline float to_float(Float16 x) {
  const uint32_t sign = uint32_t{x.bits & 0x8000u} << 16;
  const uint32_t magnitude = x.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return bits_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  // Scaling by 2^112 moves the exponent bias from 15 to 127 and is exact for subnormals too.
  const float scaled = bits_float(magnitude << 13) * 0x1p112f;
  return bits_float(sign | float_bits(scaled));
}

[[maybe_unused]] inline void from_float(float x, float* out) { *out = x; }

[[maybe_unused]] inline void from_float(float x, BFloat16* out) {
  const uint32_t bits = float_bits(x);
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  out->bits = static_cast<uint16_t>(nan ? (bits >> 16) | 0x40u : rounded >> 16);
}

[[maybe_unused]] inline void from_float(float x, Float16* out) {
  const uint32_t bits = float_bits(x);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u;
  } else if (magnitude >= 0x477ff000u) {  // 65520 and above round to infinity
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 leaves the rounded bits at the end
    half = float_bits(bits_float(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  out->bits = static_cast<uint16_t>(sign | half);
}

[[maybe_unused]] inline void from_float(float x, Float8* out) {  // what is too large is 448
  const uint32_t bits = float_bits(x);
  const uint32_t sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude - 0x3c000000u + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20;
  // below 2^-6: adding 2^14 leaves the rounded bits at the end
  const uint32_t subnormal = float_bits(bits_float(magnitude) + 0x1p14f) - 0x46800000u;
  const uint32_t finite = magnitude < 0x3c800000u ? subnormal : normal;
  const uint32_t bounded = magnitude >= 0x43e00000u ? 0x7eu : finite;
  out->bits = static_cast<uint8_t>(sign | (magnitude > 0x7f800000u ? 0x7fu : bounded));
}

// How many neighbouring elements of the summed dimension lie side by side in a packed line.
template <class T>
constexpr int kPack = 1;
template <>
constexpr int kPack<BFloat16> = 2;

}  // namespace
}  // namespace relay

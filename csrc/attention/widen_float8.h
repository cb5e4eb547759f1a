// SPDX-License-Identifier: Apache-2.0
// From float8 to the types that hold every number of it exactly.
#pragma once

#include <type_traits>

#include "vec16.h"

namespace relay {
namespace {

template <class T>
struct FloatFormat;
template <>
struct FloatFormat<float> {
  static constexpr int kMantissaBits = 23, kBias = 127;
};
template <>
struct FloatFormat<Float16> {
  static constexpr int kMantissaBits = 10, kBias = 15;
};
template <>
struct FloatFormat<BFloat16> {
  static constexpr int kMantissaBits = 7, kBias = 127;
};

template <class T>
using BitsOf = std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>;

// The bits of a T that is worth `code`, a float8 without its sign. Without branches: what is called
// for many codes becomes vector instructions.
template <class T>
constexpr BitsOf<T> widened(uint32_t code) {
  constexpr int m = FloatFormat<T>::kMantissaBits, shift = m - 3;
  constexpr uint32_t binade = 1u << m, lowest = (FloatFormat<T>::kBias - 7) * binade;
  using Bits = BitsOf<T>;
  // Bits are a concave function of the code, linear from each power of two to the next: below 8,
  // where codes have no leading one, they are the least of three lines, but for 0.
  const Bits low = static_cast<Bits>(code < 8 ? code : 8);
  const Bits above_low = static_cast<Bits>(static_cast<Bits>(code - low) << shift);
  const Bits line4 = static_cast<Bits>(lowest - binade + (low << (shift + 1)));
  const Bits line2 = static_cast<Bits>(lowest - 2 * binade + (low << (shift + 2)));
  const Bits line1 = static_cast<Bits>(lowest - 3 * binade + (low << (shift + 3)));
  const Bits least24 = line4 < line2 ? line4 : line2;
  const Bits least = least24 < line1 ? least24 : line1;
  const Bits number = static_cast<Bits>(code == 0 ? 0 : least + above_low);
  return static_cast<Bits>(code == 0x7f ? (1u << (8 * sizeof(T) - 1)) - 1 : number);
}

template <class T>
void widen_float8_one_by_one(const Float8* from, int count, T* to) {
  constexpr int sign_shift = 8 * (sizeof(T) - 1);
  for (int i = 0; i < count; ++i) {
    const uint32_t sign = from[i].bits & 0x80u;
    const auto bits = static_cast<BitsOf<T>>(widened<T>(from[i].bits & 0x7fu) | sign << sign_shift);
    std::memcpy(to + i, &bits, sizeof bits);
  }
}

#if defined(__AVX512F__)
#define RELAY_BYTE_TABLES 1

typedef uint8_t Bytes __attribute__((vector_size(64)));

// In the order in which store_pairs has the bytes of a register.
RELAY_INLINE Bytes load_bytes(const Float8* p) {
  return (Bytes)_mm512_permutexvar_epi64(_mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0),
                                         _mm512_loadu_si512(p));
}
// table[code] for codes below 16, else 0.
RELAY_INLINE Bytes look_up(const uint8_t (&table)[16], Bytes code) {
  const __m128i entries = _mm_load_si128(reinterpret_cast<const __m128i*>(table));
  return (Bytes)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(entries), (__m512i)(code + 0x70));
}
RELAY_INLINE void store_pairs(Bytes low, Bytes high, uint16_t* p) {
  _mm512_storeu_si512(p, _mm512_unpacklo_epi8((__m512i)low, (__m512i)high));
  _mm512_storeu_si512(p + 32, _mm512_unpackhi_epi8((__m512i)low, (__m512i)high));
}

#elif defined(__AVX2__)
#define RELAY_BYTE_TABLES 1

typedef uint8_t Bytes __attribute__((vector_size(32)));

RELAY_INLINE Bytes load_bytes(const Float8* p) {
  const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return (Bytes)_mm256_permute4x64_epi64(bytes, 0xd8);
}
RELAY_INLINE Bytes look_up(const uint8_t (&table)[16], Bytes code) {
  const __m128i entries = _mm_load_si128(reinterpret_cast<const __m128i*>(table));
  return (Bytes)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(entries), (__m256i)(code + 0x70));
}
RELAY_INLINE void store_pairs(Bytes low, Bytes high, uint16_t* p) {
  __m256i* to = reinterpret_cast<__m256i*>(p);
  _mm256_storeu_si256(to, _mm256_unpacklo_epi8((__m256i)low, (__m256i)high));
  _mm256_storeu_si256(to + 1, _mm256_unpackhi_epi8((__m256i)low, (__m256i)high));
}

#elif defined(RELAY_NEON)
#define RELAY_BYTE_TABLES 1

typedef uint8_t Bytes __attribute__((vector_size(16)));

RELAY_INLINE Bytes load_bytes(const Float8* p) { return (Bytes)vld1q_u8(&p->bits); }
RELAY_INLINE Bytes look_up(const uint8_t (&table)[16], Bytes code) {
  return (Bytes)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)code);
}
RELAY_INLINE void store_pairs(Bytes low, Bytes high, uint16_t* p) {
  const uint8x16x2_t pairs = {{(uint8x16_t)low, (uint8x16_t)high}};
  vst2q_u8(reinterpret_cast<uint8_t*>(p), pairs);
}

#else
#define RELAY_BYTE_TABLES 0
#endif

// Widens `count` numbers, a multiple of 64.
template <class T>
void widen_float8(const Float8* from, int count, T* to) {
#if RELAY_BYTE_TABLES
  // Bits grow linearly with codes, but for those below 8: tables have what there is to flip. The
  // bits of a float are those of a bfloat16 and zeros.
  using Pair = std::conditional_t<sizeof(T) == 4, BFloat16, T>;
  constexpr int kShift = FloatFormat<Pair>::kMantissaBits - 3;
  constexpr int kLowest = (FloatFormat<Pair>::kBias - 7) << FloatFormat<Pair>::kMantissaBits;
  struct Flips {
    alignas(16) uint8_t low[16] = {}, high[16] = {};
  };
  static constexpr Flips kFlips = [] {
    Flips flips;
    for (int code = 0; code < 8; ++code) {
      const int flipped = (kLowest + (code << kShift)) ^ widened<Pair>(code);
      flips.low[code] = static_cast<uint8_t>(flipped);
      flips.high[code] = static_cast<uint8_t>(flipped >> 8);
    }
    return flips;
  }();
  constexpr uint8_t kHigh = kLowest >> 8;
  constexpr int kPageBytes = 4096, kLineBytes = 64;
  for (int i = 0; i < count; i += int{sizeof(Bytes)}) {
    // a head's keys, and its values behind them, are a few pages, at whose ends processors stop
    // reading ahead
    if (i % kLineBytes == 0) __builtin_prefetch(from + i + kPageBytes, 0, 2);
    const Bytes bytes = load_bytes(from + i), code = bytes & 0x7f;
    const Bytes low = (code << kShift) ^ look_up(kFlips.low, code);
    const Bytes high = ((code >> (8 - kShift)) + kHigh) ^ look_up(kFlips.high, code);
    const Bytes nan = (Bytes)(code == 0x7f);
    const Bytes signed_high = high | (bytes & 0x80) | nan;
    if constexpr (sizeof(T) == 2) {
      store_pairs(low, signed_high, reinterpret_cast<uint16_t*>(to + i));
    } else {
      uint16_t pairs[sizeof(Bytes)];
      store_pairs(low, signed_high, pairs);
      for (int j = 0; j < int{sizeof(Bytes)}; ++j) to[i + j] = bits_float(uint32_t{pairs[j]} << 16);
    }
  }
#else
  widen_float8_one_by_one(from, count, to);
#endif
}

}  // namespace
}  // namespace relay

// SPDX-License-Identifier: Apache-2.0
// Folding: 256 bytes move past the next 256 by multiplications without carries (Gopal et al., "Fast
// CRC Computation for Generic Polynomials Using PCLMULQDQ", Intel 2009).
#include <immintrin.h>

#include <cstring>

#include "crc32c.h"
#include "crc32c_polynomial.h"

namespace relay {
namespace {

// The factors that move 128 bits `Bytes` bytes further. Their low half lies 64 bits further to the
// front; a product of reflected polynomials comes out times x; and a reflected polynomial of 32
// bits sits in the upper half of 64.
template <int Bytes>
struct Factors {
  static constexpr uint64_t front = uint64_t{power_of_x(8 * Bytes + 63)} << 32;
  static constexpr uint64_t back = uint64_t{power_of_x(8 * Bytes - 1)} << 32;
};

template <int Bytes>
__m512i moved(__m512i value) {
  const __m512i factors = _mm512_broadcast_i32x4(_mm_set_epi64x(
      static_cast<int64_t>(Factors<Bytes>::back), static_cast<int64_t>(Factors<Bytes>::front)));
  return _mm512_xor_si512(_mm512_clmulepi64_epi128(value, factors, 0x00),
                          _mm512_clmulepi64_epi128(value, factors, 0x11));
}

template <int Bytes>
__m128i moved(__m128i value) {
  const __m128i factors = _mm_set_epi64x(static_cast<int64_t>(Factors<Bytes>::back),
                                         static_cast<int64_t>(Factors<Bytes>::front));
  return _mm_xor_si128(_mm_clmulepi64_si128(value, factors, 0x00),
                       _mm_clmulepi64_si128(value, factors, 0x11));
}

uint64_t load(const uint8_t* data) {
  uint64_t word;
  std::memcpy(&word, data, sizeof word);
  return word;
}

}  // namespace

uint32_t crc32c_avx512_vpclmulqdq(uint32_t crc, const uint8_t* data, std::size_t bytes) {
  uint64_t state = static_cast<uint32_t>(~crc);
  if (bytes >= 256) {
    __m512i a = _mm512_loadu_si512(data), b = _mm512_loadu_si512(data + 64);
    __m512i c = _mm512_loadu_si512(data + 128), d = _mm512_loadu_si512(data + 192);
    a = _mm512_xor_si512(a, _mm512_zextsi128_si512(
                                _mm_cvtsi32_si128(static_cast<int>(static_cast<uint32_t>(state)))));
    for (data += 256, bytes -= 256; bytes >= 256; data += 256, bytes -= 256) {
      a = _mm512_xor_si512(moved<256>(a), _mm512_loadu_si512(data));
      b = _mm512_xor_si512(moved<256>(b), _mm512_loadu_si512(data + 64));
      c = _mm512_xor_si512(moved<256>(c), _mm512_loadu_si512(data + 128));
      d = _mm512_xor_si512(moved<256>(d), _mm512_loadu_si512(data + 192));
    }
    b = _mm512_xor_si512(b, moved<64>(a));
    c = _mm512_xor_si512(c, moved<64>(b));
    d = _mm512_xor_si512(d, moved<64>(c));
    __m128i rest = _mm512_castsi512_si128(d);
    rest = _mm_xor_si128(moved<16>(rest), _mm512_extracti32x4_epi32(d, 1));
    rest = _mm_xor_si128(moved<16>(rest), _mm512_extracti32x4_epi32(d, 2));
    rest = _mm_xor_si128(moved<16>(rest), _mm512_extracti32x4_epi32(d, 3));
    state = _mm_crc32_u64(0, static_cast<uint64_t>(_mm_cvtsi128_si64(rest)));
    state = _mm_crc32_u64(state, static_cast<uint64_t>(_mm_extract_epi64(rest, 1)));
  }
  for (; bytes >= 8; data += 8, bytes -= 8) state = _mm_crc32_u64(state, load(data));
  for (; bytes; ++data, --bytes) state = _mm_crc32_u8(static_cast<uint32_t>(state), *data);
  return ~static_cast<uint32_t>(state);
}

}  // namespace relay

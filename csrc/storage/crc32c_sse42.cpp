// SPDX-License-Identifier: Apache-2.0
// crc32 takes three cycles and can begin every cycle, so three stretches advance together.
#include <immintrin.h>

#include <cstring>

#include "crc32c.h"
#include "crc32c_polynomial.h"

namespace relay {
namespace {

uint64_t load(const uint8_t* data) {
  uint64_t word;
  std::memcpy(&word, data, sizeof word);
  return word;
}

// What crc32 of 0 has to be given for `crc` followed by `Bytes` zero bytes. The product of two
// reflected polynomials comes out times x, and crc32 multiplies by x^32.
template <int Bytes>
uint64_t followed_by_zeros(uint64_t crc) {
  constexpr uint32_t factor = power_of_x(8 * Bytes - 33);
  const __m128i product =
      _mm_clmulepi64_si128(_mm_cvtsi64_si128(static_cast<int64_t>(crc)),
                           _mm_cvtsi64_si128(static_cast<int64_t>(uint64_t{factor})), 0);
  return static_cast<uint64_t>(_mm_cvtsi128_si64(product));
}

// As many times three stretches of `Bytes` bytes as there are.
template <int Bytes>
uint64_t three_at_once(uint64_t crc, const uint8_t*& data, std::size_t& bytes) {
  for (; bytes >= 3 * Bytes; data += 3 * Bytes, bytes -= 3 * Bytes) {
    uint64_t second = 0, third = 0;
    for (int i = 0; i < Bytes; i += 8) {
      crc = _mm_crc32_u64(crc, load(data + i));
      second = _mm_crc32_u64(second, load(data + Bytes + i));
      third = _mm_crc32_u64(third, load(data + 2 * Bytes + i));
    }
    crc = third ^
          _mm_crc32_u64(0, followed_by_zeros<2 * Bytes>(crc) ^ followed_by_zeros<Bytes>(second));
  }
  return crc;
}

}  // namespace

uint32_t crc32c_sse42(uint32_t crc, const uint8_t* data, std::size_t bytes) {
  uint64_t state = static_cast<uint32_t>(~crc);
  state = three_at_once<1024>(state, data, bytes);
  state = three_at_once<64>(state, data, bytes);
  for (; bytes >= 8; data += 8, bytes -= 8) state = _mm_crc32_u64(state, load(data));
  for (; bytes; ++data, --bytes) state = _mm_crc32_u8(static_cast<uint32_t>(state), *data);
  return ~static_cast<uint32_t>(state);
}

}  // namespace relay

// SPDX-License-Identifier: Apache-2.0
// Key codes laid out for scanning, so that a product of a block with a query needs no sum across
// lanes. `stride` is the length of a whole code, a multiple of 64.
#pragma once

#include <cstdint>
#include <cstring>

namespace relay::index {

constexpr int kBlockKeys = 16;

// Copies one key's code into its lane of a block of sixteen: [stride / 4][16 keys][4 bytes].
inline void write_lane(const uint8_t* code, int32_t stride, uint8_t* block, int64_t lane) {
  for (int32_t s = 0; s < stride / 4; ++s)
    std::memcpy(block + (s * kBlockKeys + lane) * 4, code + 4 * s, 4);
}

// The upper four bits of one key's code into its lane: [stride / 8][16 keys][4 bytes], of which a
// byte has elements that are four apart.
inline void write_upper_lane(const uint8_t* code, int32_t stride, uint8_t* block, int64_t lane) {
  for (int32_t s = 0; s < stride / 8; ++s)
    for (int32_t i = 0; i < 4; ++i)
      block[(s * kBlockKeys + lane) * 4 + i] =
          static_cast<uint8_t>(code[8 * s + i] >> 4 | (code[8 * s + 4 + i] & 0xf0));
}

// The lower four bits as a row of stride / 2 bytes, of which a byte has elements that are 32 apart.
inline void write_lower_row(const uint8_t* code, int32_t stride, uint8_t* row) {
  for (int32_t first = 0; first < stride; first += 64)
    for (int32_t i = 0; i < 32; ++i)
      row[first / 2 + i] =
          static_cast<uint8_t>((code[first + i] & 0x0f) | code[first + 32 + i] << 4);
}

}  // namespace relay::index

// SPDX-License-Identifier: Apache-2.0
// Key codes laid out for scanning: blocks of sixteen keys, [stride / 4][16 keys][4 bytes], so that
// a product of a block with a query needs no sum across lanes.
#pragma once

#include <cstdint>
#include <cstring>

namespace relay::index {

constexpr int kBlockKeys = 16;

// Copies one key's code into its lane.
inline void write_lane(const uint8_t* code, int32_t stride, uint8_t* block, int64_t lane) {
  for (int32_t s = 0; s < stride / 4; ++s)
    std::memcpy(block + (s * kBlockKeys + lane) * 4, code + 4 * s, 4);
}

}  // namespace relay::index

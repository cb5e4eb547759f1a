// SPDX-License-Identifier: Apache-2.0
// CRC-32C (Castagnoli's polynomial, reflected, as in RFC 3720).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace relay {

// The checksum of what gave `crc`, followed by these bytes; of these bytes alone if `crc` is 0.
using Crc32cFunction = uint32_t (*)(uint32_t crc, const uint8_t* data, std::size_t bytes);

uint32_t crc32c_portable(uint32_t crc, const uint8_t* data, std::size_t bytes);
uint32_t crc32c_sse42(uint32_t crc, const uint8_t* data, std::size_t bytes);
uint32_t crc32c_avx512_vpclmulqdq(uint32_t crc, const uint8_t* data, std::size_t bytes);

struct Crc32cKernel {
  std::string_view name;
  Crc32cFunction run;
  bool (*runs_here)();
};

// Best first; the last one runs everywhere.
extern const Crc32cKernel kCrc32cKernels[];
extern const int kNumCrc32cKernels;

// The best kernel of this machine.
Crc32cFunction crc32c();

}  // namespace relay

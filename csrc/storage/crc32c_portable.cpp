// SPDX-License-Identifier: Apache-2.0
// Eight tables: eight bytes a step.
#include <array>

#include "crc32c.h"
#include "crc32c_polynomial.h"

namespace relay {
namespace {

using Tables = std::array<std::array<uint32_t, 256>, 8>;

// tables[n][b]: byte b followed by n zero bytes.
constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = times_x(crc);
    tables[0][byte] = crc;
  }
  for (int n = 1; n < 8; ++n)
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const uint32_t shorter = tables[n - 1][byte];
      tables[n][byte] = (shorter >> 8) ^ tables[0][shorter & 0xff];
    }
  return tables;
}

constexpr Tables kTables = make_tables();

}  // namespace

uint32_t crc32c_portable(uint32_t crc, const uint8_t* data, std::size_t bytes) {
  crc = ~crc;
  for (; bytes >= 8; data += 8, bytes -= 8) {
    const uint32_t low = crc ^ (data[0] | uint32_t{data[1]} << 8 | uint32_t{data[2]} << 16 |
                                uint32_t{data[3]} << 24);
    crc = kTables[7][low & 0xff] ^ kTables[6][(low >> 8) & 0xff] ^ kTables[5][(low >> 16) & 0xff] ^
          kTables[4][low >> 24] ^ kTables[3][data[4]] ^ kTables[2][data[5]] ^ kTables[1][data[6]] ^
          kTables[0][data[7]];
  }
  for (; bytes; ++data, --bytes) crc = (crc >> 8) ^ kTables[0][(crc ^ *data) & 0xff];
  return ~crc;
}

}  // namespace relay

// SPDX-License-Identifier: Apache-2.0
// One CRC-32C for each page of a section; the last page may be short.
#pragma once

#include <cstddef>
#include <cstdint>

#include "crc32c.h"

namespace relay {

struct Pages {
  const uint8_t* data;
  std::size_t bytes;
  std::size_t page_bytes;

  std::size_t count() const { return bytes / page_bytes + (bytes % page_bytes != 0); }
  const uint8_t* begin(std::size_t page) const { return data + page * page_bytes; }
  std::size_t size(std::size_t page) const {
    return page_bytes < bytes - page * page_bytes ? page_bytes : bytes - page * page_bytes;
  }
};

// checksums: [count()].
void checksum_pages(const Pages& pages, Crc32cFunction crc32c, uint32_t* checksums);

// Where bytes lie. Linux tells what of a file is in memory to its owner and those who may write to
// it; to others it says that all is.
enum class Mapping { kNone, kOwnFile, kFile };

// Brings mapped bytes in. False where an access would raise SIGBUS; true also where the kernel
// cannot say it (before Linux 5.14).
bool populate(const uint8_t* data, std::size_t bytes, Mapping mapping);

struct PageDamage {
  int64_t page = -1;     // -1: none
  uint32_t found = 0;    // its checksum
  bool readable = true;  // false: reading the page would have raised SIGBUS
};

// The first page of [begin, end) that differs from its checksum. Pages of a mapped file are brought
// in first, so that what the disk cannot read, or is no longer there, is reported and does not end
// the process.
PageDamage find_damage(const Pages& pages, Crc32cFunction crc32c, const uint32_t* checksums,
                       std::size_t begin, std::size_t end, Mapping mapping);

}  // namespace relay

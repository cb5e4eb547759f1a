// SPDX-License-Identifier: Apache-2.0
#include "page_checksums.h"

#include <algorithm>
#include <cerrno>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace relay {
namespace {

constexpr std::size_t kPopulateBytes = std::size_t{1} << 20;  // stays in the L2 cache until read

}  // namespace

#if defined(__linux__)
namespace {

constexpr int kPopulateRead = 22;  // MADV_POPULATE_READ; glibc's headers have it since 2.35

bool ask_for(uintptr_t begin, std::size_t bytes) {
  int status;
  do status = madvise(reinterpret_cast<void*>(begin), bytes, kPopulateRead);
  while (status != 0 && errno == EINTR);
  return status == 0 || (errno != EFAULT && errno != EHWPOISON);
}

// Whether all of it lies in memory.
bool is_resident(uintptr_t begin, std::size_t bytes, std::size_t system_page) {
  constexpr std::size_t kPages = 256;
  unsigned char resident[kPages];
  const std::size_t pages = (bytes + system_page - 1) / system_page;
  if (pages > kPages || mincore(reinterpret_cast<void*>(begin), bytes, resident) != 0) return false;
  return std::all_of(resident, resident + pages, [](unsigned char page) { return page & 1; });
}

}  // namespace

bool populate(const uint8_t* data, std::size_t bytes, Mapping mapping) {
  if (mapping == Mapping::kNone) return true;
  static const auto system_page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = address / system_page * system_page;
  bytes += address - begin;
  if (bytes <= system_page || mapping != Mapping::kOwnFile) return ask_for(begin, bytes);
  // one page maps its neighbours that lie in memory, which is cheaper than asking for each
  return ask_for(begin, 1) && (is_resident(begin, bytes, system_page) || ask_for(begin, bytes));
}
#else
bool populate(const uint8_t*, std::size_t, Mapping) { return true; }
#endif

void checksum_pages(const Pages& pages, Crc32cFunction crc32c, uint32_t* checksums) {
  for (std::size_t i = 0; i < pages.count(); ++i)
    checksums[i] = crc32c(0, pages.begin(i), pages.size(i));
}

PageDamage find_damage(const Pages& pages, Crc32cFunction crc32c, const uint32_t* checksums,
                       std::size_t begin, std::size_t end, Mapping mapping) {
  const std::size_t at_once = std::max<std::size_t>(1, kPopulateBytes / pages.page_bytes);
  for (std::size_t i = begin; i < end;) {
    std::size_t part_end = std::min(end, i + at_once);
    const std::size_t bytes = (part_end - 1 - i) * pages.page_bytes + pages.size(part_end - 1);
    if (!populate(pages.begin(i), bytes, mapping)) {
      part_end = i + 1;  // one of several: find out which
      if (!populate(pages.begin(i), pages.size(i), mapping))
        return {static_cast<int64_t>(i), 0, false};
    }
    for (; i < part_end; ++i) {
      const uint32_t found = crc32c(0, pages.begin(i), pages.size(i));
      if (found != checksums[i]) return {static_cast<int64_t>(i), found, true};
    }
  }
  return {};
}

}  // namespace relay

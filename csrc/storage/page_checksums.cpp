// SPDX-License-Identifier: Apache-2.0
#include "page_checksums.h"

#include <cerrno>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace relay {
namespace {

constexpr std::size_t kPopulateBytes = std::size_t{1} << 20;  // stays in the L2 cache until read

// False where an access would raise SIGBUS; true also where the kernel cannot say it (before 5.14).
bool populate(const uint8_t* data, std::size_t bytes) {
#if defined(__linux__)
  constexpr int kPopulateRead = 22;  // MADV_POPULATE_READ; glibc's headers have it since 2.35
  static const uintptr_t system_page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = address / system_page * system_page;
  int status;
  do status = madvise(reinterpret_cast<void*>(begin), address + bytes - begin, kPopulateRead);
  while (status != 0 && errno == EINTR);
  return status == 0 || (errno != EFAULT && errno != EHWPOISON);
#else
  (void)data;
  (void)bytes;
  return true;
#endif
}

}  // namespace

void checksum_pages(const Pages& pages, Crc32cFunction crc32c, uint32_t* checksums) {
  for (std::size_t i = 0; i < pages.count(); ++i)
    checksums[i] = crc32c(0, pages.begin(i), pages.size(i));
}

PageDamage find_damage(const Pages& pages, Crc32cFunction crc32c, const uint32_t* checksums,
                       const int64_t* chosen, std::size_t num_chosen, bool mapped) {
  for (std::size_t i = 0; i < num_chosen;) {
    // neighbours are brought in together
    std::size_t end = i + 1;
    std::size_t bytes = pages.size(static_cast<std::size_t>(chosen[i]));
    while (end < num_chosen && chosen[end] == chosen[end - 1] + 1 && bytes < kPopulateBytes)
      bytes += pages.size(static_cast<std::size_t>(chosen[end++]));
    if (mapped && !populate(pages.begin(static_cast<std::size_t>(chosen[i])), bytes)) {
      if (end == i + 1) return {chosen[i], 0, false};
      end = i + 1;  // one of several: find out which
      if (!populate(pages.begin(static_cast<std::size_t>(chosen[i])),
                    pages.size(static_cast<std::size_t>(chosen[i]))))
        return {chosen[i], 0, false};
    }
    for (; i < end; ++i) {
      const std::size_t page = static_cast<std::size_t>(chosen[i]);
      const uint32_t found = crc32c(0, pages.begin(page), pages.size(page));
      if (found != checksums[page]) return {chosen[i], found, true};
    }
  }
  return {};
}

}  // namespace relay

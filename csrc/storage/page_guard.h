// SPDX-License-Identifier: Apache-2.0
// Verifies pages of a section at their first touch. For any number of threads.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <vector>

#include "page_checksums.h"

namespace relay {

class PageGuard;

struct DamagedPageError : std::exception {
  DamagedPageError(const PageGuard* guard, const PageDamage& damage)
      : guard(guard), damage(damage) {}
  const char* what() const noexcept override { return "a page differs from its checksum"; }

  const PageGuard* guard;
  PageDamage damage;
};

// One bit for each of `count` things; set once, by whoever comes first.
class OnceBits {
 public:
  explicit OnceBits(std::size_t count) : words_((count + 63) / 64) {}
  bool test(std::size_t i) const {
    return words_[i / 64].load(std::memory_order_relaxed) >> (i % 64) & 1;
  }
  void set(std::size_t i) {
    words_[i / 64].fetch_or(uint64_t{1} << (i % 64), std::memory_order_relaxed);
  }

 private:
  std::vector<std::atomic<uint64_t>> words_;
};

class PageGuard {
 public:
  // checksums: [pages.count()], verified. `around_bytes`: of a mapped file, what is brought in
  // together with a page.
  PageGuard(const Pages& pages, const uint32_t* checksums, Mapping mapping,
            std::size_t around_bytes);
  PageGuard(const PageGuard&) = delete;

  const Pages& pages() const { return pages_; }

  // Each throws DamagedPageError. What was verified before is not looked at again.
  void verify(std::size_t page) const {
    if (!is_verified_.test(page)) [[unlikely]]
      verify_first(page);
  }
  void verify(std::size_t begin, std::size_t end) const;

  // Whatever was verified before.
  void verify_anew(std::size_t begin, std::size_t end) const;

 private:
  void verify_first(std::size_t page) const;
  void bring_in_around(std::size_t page) const;

  const Pages pages_;
  const uint32_t* const checksums_;
  const Mapping mapping_;
  const std::size_t around_bytes_;
  const Crc32cFunction crc32c_;
  mutable OnceBits is_verified_;
  mutable OnceBits is_brought_in_;  // each `around_bytes_`
};

}  // namespace relay

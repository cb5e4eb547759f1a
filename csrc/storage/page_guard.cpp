// SPDX-License-Identifier: Apache-2.0
#include "page_guard.h"

#include <algorithm>

namespace relay {

PageGuard::PageGuard(const Pages& pages, const uint32_t* checksums, Mapping mapping,
                     std::size_t around_bytes)
    : pages_(pages),
      checksums_(checksums),
      mapping_(mapping),
      around_bytes_(around_bytes),
      crc32c_(crc32c()),
      is_verified_(pages.count()),
      is_brought_in_(mapping == Mapping::kNone ? 0 : pages.bytes / around_bytes + 1) {}

void PageGuard::verify(std::size_t begin, std::size_t end) const {
  while (begin < end) {
    if (is_verified_.test(begin)) {
      ++begin;
      continue;
    }
    std::size_t run_end = begin + 1;
    while (run_end < end && !is_verified_.test(run_end)) ++run_end;
    verify_anew(begin, run_end);
    begin = run_end;
  }
}

void PageGuard::verify_anew(std::size_t begin, std::size_t end) const {
  const PageDamage damage = find_damage(pages_, crc32c_, checksums_, begin, end, mapping_);
  if (damage.page >= 0) throw DamagedPageError(this, damage);
  for (std::size_t page = begin; page < end; ++page) is_verified_.set(page);
}

void PageGuard::verify_first(std::size_t page) const {
  if (mapping_ != Mapping::kNone) bring_in_around(page);
  const uint32_t found = crc32c_(0, pages_.begin(page), pages_.size(page));
  if (found != checksums_[page])
    throw DamagedPageError(this, {static_cast<int64_t>(page), found, true});
  is_verified_.set(page);
}

void PageGuard::bring_in_around(std::size_t page) const {
  const std::size_t first_byte = page * pages_.page_bytes;
  const std::size_t last_byte = first_byte + pages_.size(page) - 1;
  for (std::size_t at = first_byte / around_bytes_; at <= last_byte / around_bytes_; ++at) {
    if (is_brought_in_.test(at)) continue;
    const std::size_t begin = at * around_bytes_;
    const std::size_t bytes = std::min(around_bytes_, pages_.bytes - begin);
    if (populate(pages_.data + begin, bytes, mapping_)) {
      is_brought_in_.set(at);
    } else {
      // something else in the neighbourhood may be to blame
      verify_anew(page, page + 1);
    }
  }
}

}  // namespace relay

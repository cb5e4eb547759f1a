// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>
#include <utility>

#include "storage/page_guard.h"

// A guard that keeps its arrays, and knows whom to ask what to raise: `on_damage` is called with
// the page and its checksum as it is (None: it cannot be read) and returns an exception. It must
// not hold the guard: such a cycle would never be collected.
class BoundGuard : public relay::PageGuard {
 public:
  template <class T>
  using Array = nanobind::ndarray<T, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;

  BoundGuard(Array<const uint8_t> data, size_t page_bytes, Array<const uint32_t> checksums,
             relay::Mapping mapping, size_t around_bytes, nanobind::object on_damage)
      : PageGuard({data.data(), data.size(), page_bytes}, checksums.data(), mapping, around_bytes),
        on_damage(std::move(on_damage)),
        data_(std::move(data)),
        checksums_(std::move(checksums)) {}

  const nanobind::object on_damage;

 private:
  const Array<const uint8_t> data_;
  const Array<const uint32_t> checksums_;
};

// A guard or None, as an argument beside the rows it verifies; the address needs no GIL.
struct GuardArgument {
  // Throws std::invalid_argument: its pages are not these rows.
  GuardArgument(nanobind::object argument, const void* rows, size_t num_rows, size_t row_bytes)
      : owner(std::move(argument)) {
    if (owner.is_none()) return;
    guard = nanobind::cast<const BoundGuard*>(owner);
    const relay::Pages& pages = guard->pages();
    if (pages.data != rows || pages.page_bytes != row_bytes || pages.bytes != num_rows * row_bytes)
      throw std::invalid_argument("guard: of other rows than those it is given with");
  }

  nanobind::object owner;
  const relay::PageGuard* guard = nullptr;
};

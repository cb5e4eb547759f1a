// SPDX-License-Identifier: Apache-2.0
// Stored arrays whose checksums are right and that no index can have: a file may come from anybody.
#pragma once

#include <cstdint>
#include <stdexcept>

namespace relay::index {

struct DamagedIndexError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[noreturn]] void throw_damaged_row(const char* what, int64_t row);

}  // namespace relay::index

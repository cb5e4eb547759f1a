// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <numeric>

namespace relay::index {
namespace {

// A permutation of 0 .. n - 1 any beginning of which is spread over the whole range.
class SpreadOrder {
 public:
  explicit SpreadOrder(int64_t n) : n_(n) {
    if (n < 3) return;
    step_ = static_cast<int64_t>(static_cast<double>(n) * 0.618033988749895);
    while (std::gcd(step_, n) != 1) ++step_;
  }
  int64_t operator[](int64_t position) const { return position * step_ % n_; }

 private:
  int64_t n_, step_ = 1;
};

}  // namespace
}  // namespace relay::index

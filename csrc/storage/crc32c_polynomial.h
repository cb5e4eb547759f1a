// SPDX-License-Identifier: Apache-2.0
// Arithmetic modulo Castagnoli's polynomial P, at compile time. Polynomials are reflected: the
// highest bit is the coefficient of x^0.
#pragma once

#include <cstdint>

namespace relay {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;  // P without x^32

constexpr uint32_t times_x(uint32_t a) { return (a >> 1) ^ ((a & 1) ? kPolynomial : 0); }

// x^exponent mod P.
constexpr uint32_t power_of_x(int exponent) {
  uint32_t power = 0x80000000u;
  for (int i = 0; i < exponent; ++i) power = times_x(power);
  return power;
}

}  // namespace
}  // namespace relay

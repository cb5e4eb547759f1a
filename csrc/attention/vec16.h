// SPDX-License-Identifier: Apache-2.0
// Sixteen floats, in the registers that this translation unit may use.
#pragma once

#if defined(__AVX512F__)
#include "vec16/avx512.h"
#elif defined(__AVX2__)
#include "vec16/avx2.h"
#elif defined(RELAY_NEON)
#include "vec16/neon.h"
#else
#include "vec16/any_cpu.h"
#endif

namespace relay {
namespace {

RELAY_INLINE Vec16 exp2_16(Vec16 t) { return exp2_by(kExp2, t); }
RELAY_INLINE Vec16 exp2_roughly16(Vec16 t) { return exp2_by(kExp2Roughly, t); }

// tanh(x) = 1 - 2 / (1 + e^(2x)); e^(2x) may overflow to infinity or vanish.
RELAY_INLINE Vec16 tanh16(Vec16 x) {
  const Vec16 e = exp2_16(x * set16(2.f * kLog2E));
  return set16(1.f) - set16(2.f) / (set16(1.f) + e);
}

}  // namespace
}  // namespace relay

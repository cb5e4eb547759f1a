// SPDX-License-Identifier: Apache-2.0
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace relay {

// While it lives, results of its thread below 2^-126 are zero. x86 takes far longer for each
// that is not, and far below a row's largest score all weights are such. What is read stays as it
// is: half floats are widened through numbers below 2^-126. Other CPUs lose no time.
class FlushSubnormals {
 public:
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;
#if defined(__x86_64__)
  FlushSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | _MM_FLUSH_ZERO_ON); }
  ~FlushSubnormals() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#else
  FlushSubnormals() {}
  ~FlushSubnormals() {}
#endif
};

}  // namespace relay

// SPDX-License-Identifier: Apache-2.0
#include "crc32c.h"

#include "../common/cpu_features.h"

namespace relay {
namespace {

bool any_machine() { return true; }
#if RELAY_HAVE_SSE42
bool machine_has_sse42() { return cpu_features().sse42; }
#endif
#if RELAY_HAVE_AVX512_VPCLMULQDQ
bool machine_has_avx512_vpclmulqdq() { return cpu_features().avx512_vpclmulqdq; }
#endif

Crc32cFunction best() {
  for (int i = 0; i < kNumCrc32cKernels; ++i)
    if (kCrc32cKernels[i].runs_here()) return kCrc32cKernels[i].run;
  return crc32c_portable;
}

}  // namespace

const Crc32cKernel kCrc32cKernels[] = {
#if RELAY_HAVE_AVX512_VPCLMULQDQ
    {"avx512_vpclmulqdq", crc32c_avx512_vpclmulqdq, machine_has_avx512_vpclmulqdq},
#endif
#if RELAY_HAVE_SSE42
    {"sse42", crc32c_sse42, machine_has_sse42},
#endif
    {"portable", crc32c_portable, any_machine},
};
const int kNumCrc32cKernels = sizeof(kCrc32cKernels) / sizeof(kCrc32cKernels[0]);

Crc32cFunction crc32c() {
  static const Crc32cFunction function = best();
  return function;
}

}  // namespace relay

// SPDX-License-Identifier: Apache-2.0
#include "cpu_features.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace relay {
namespace {

#if defined(__aarch64__)
bool multiplies_bf16() {
#if defined(__linux__)
  constexpr unsigned long kBf16 = 1ul << 14;  // HWCAP2_BF16
  return getauxval(AT_HWCAP2) & kBf16;
#elif defined(__APPLE__)
  int present = 0;
  size_t size = sizeof present;
  return sysctlbyname("hw.optional.arm.FEAT_BF16", &present, &size, nullptr, 0) == 0 && present;
#else
  return false;
#endif
}
#endif

#if defined(__x86_64__)
bool is_intel() {
  unsigned a, b, c, d;
  return __get_cpuid(0, &a, &b, &c, &d) && b == signature_INTEL_ebx;
}

bool operating_system_saves(unsigned state_mask) {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return false;
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & state_mask) == state_mask;
}

bool tile_registers_permitted() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

CpuFeatures detect() {
  CpuFeatures features;
#if defined(__x86_64__)
  constexpr unsigned kAvxState = 0x6, kAvx512State = 0xe6, kTileState = 0x60000;
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return features;
  const bool fma_and_f16c = (c & bit_FMA) && (c & bit_F16C);
  features.sse42 = (c & bit_SSE4_2) && (c & bit_PCLMUL);
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return features;
  const unsigned ebx7 = b, ecx7 = c, edx7 = d;
  const unsigned avx512 = (1u << 16) | (1u << 17) | (1u << 30) | (1u << 31);  // F, DQ, BW, VL
  features.avx2 = (ebx7 & bit_AVX2) && fma_and_f16c && operating_system_saves(kAvxState);
  features.avx512 = (ebx7 & avx512) == avx512 && operating_system_saves(kAvx512State);
  features.avx512_vnni = features.avx512 && (ecx7 & (1u << 11));
  features.avx512_vpclmulqdq = features.avx512 && features.sse42 && (ecx7 & (1u << 10));
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d))
    features.avx512_bf16 = features.avx512 && (a & (1u << 5));
  constexpr unsigned kAvx512Fp16 = 1u << 23;  // Cooper Lake has bf16 without it
  features.avx512_bf16_is_slow = features.avx512_bf16 && (edx7 & kAvx512Fp16) && is_intel();
  const unsigned amx = (1u << 22) | (1u << 24);  // AMX-BF16, AMX-TILE
  features.amx_bf16 = features.avx512_bf16 && (edx7 & amx) == amx &&
                      operating_system_saves(kTileState) && tile_registers_permitted();
#elif defined(__aarch64__)
  features.neon = true;
  features.neon_bf16 = multiplies_bf16();
#endif
  return features;
}

}  // namespace

const CpuFeatures& cpu_features() {
  static const CpuFeatures features = detect();
  return features;
}

}  // namespace relay

// SPDX-License-Identifier: Apache-2.0
#include "kernels.h"

#include "../common/cpu_features.h"

namespace relay {
namespace {

bool any_machine() { return true; }
bool machine_has_avx2() { return cpu_features().avx2; }
bool machine_has_avx512() { return cpu_features().avx512; }
bool machine_has_avx512_bf16() { return cpu_features().avx512_bf16; }
bool machine_has_amx_bf16() { return cpu_features().amx_bf16; }
bool machine_has_neon() { return cpu_features().neon; }
bool machine_has_neon_bf16() { return cpu_features().neon_bf16; }
bool takes_any(DType) { return true; }
bool takes_bfloat16(DType type) { return type == DType::kBFloat16; }

}  // namespace

const KernelInfo kKernels[] = {
#if RELAY_HAVE_AMX_BF16
    {"amx_bf16", attention_amx_bf16, attention_amx_bf16, machine_has_amx_bf16, takes_bfloat16},
#else
    {"amx_bf16", nullptr, nullptr, machine_has_amx_bf16, takes_bfloat16},
#endif
#if RELAY_HAVE_AVX512_BF16
    {"avx512_bf16", attention_avx512_bf16, attention_avx512_bf16, machine_has_avx512_bf16,
     takes_bfloat16},
#else
    {"avx512_bf16", nullptr, nullptr, machine_has_avx512_bf16, takes_bfloat16},
#endif
#if RELAY_HAVE_AVX512
    {"avx512", attention_avx512, attention_avx512, machine_has_avx512, takes_any},
#else
    {"avx512", nullptr, nullptr, machine_has_avx512, takes_any},
#endif
#if RELAY_HAVE_AVX2
    {"avx2", attention_avx2, attention_avx2, machine_has_avx2, takes_any},
#else
    {"avx2", nullptr, nullptr, machine_has_avx2, takes_any},
#endif
#if RELAY_HAVE_NEON_BF16
    {"neon_bf16", attention_neon_bf16, attention_neon_bf16, machine_has_neon_bf16, takes_bfloat16},
#else
    {"neon_bf16", nullptr, nullptr, machine_has_neon_bf16, takes_bfloat16},
#endif
#if RELAY_HAVE_NEON
    {"neon", attention_neon, attention_neon, machine_has_neon, takes_any},
#else
    {"neon", nullptr, nullptr, machine_has_neon, takes_any},
#endif
    {"portable", attention_portable, attention_portable, any_machine, takes_any},
#if RELAY_HAVE_AVX512_BF16
    {"avx512_bf16_rounded", attention_avx512_bf16_rounded, attention_avx512_bf16_rounded,
     machine_has_avx512_bf16, takes_bfloat16},
#endif
#if RELAY_HAVE_AVX512
    {"amx_bf16_emulated", attention_amx_bf16_emulated, attention_amx_bf16_emulated,
     machine_has_avx512, takes_bfloat16},
#endif
};
const int kNumKernels = sizeof(kKernels) / sizeof(kKernels[0]);

}  // namespace relay

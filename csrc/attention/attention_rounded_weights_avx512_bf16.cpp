// SPDX-License-Identifier: Apache-2.0
// The AVX-512 BF16 kernel with weights rounded to bf16, as AMX needs them: a third less work where
// arithmetic is what limits, for about 1.4 times the rms error.
#define RELAY_ROUND_WEIGHTS

#include "run_kernel.h"
#include "vector_kernel.h"

void relay::attention_avx512_bf16_rounded(const Problem& problem, const Plan& plan) {
  run_kernel<BFloat16, VectorKernel<BFloat16>>(problem, plan);
}

void relay::attention_avx512_bf16_rounded(const Problem& problem, const Unpacked& unpacked) {
  run_kernel<BFloat16, VectorKernel<BFloat16>>(problem, unpacked);
}

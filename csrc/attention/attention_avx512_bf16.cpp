// SPDX-License-Identifier: Apache-2.0
#include "run_kernel.h"
#include "vector_kernel.h"

// Machines with bf16 products have AVX-512 too, whose kernel serves the other types.
void relay::attention_avx512_bf16(const Problem& problem, const Plan& plan) {
  run_kernel<BFloat16, VectorKernel<BFloat16>>(problem, plan);
}

void relay::attention_avx512_bf16(const Problem& problem, const Unpacked& unpacked) {
  run_kernel<BFloat16, VectorKernel<BFloat16>>(problem, unpacked);
}

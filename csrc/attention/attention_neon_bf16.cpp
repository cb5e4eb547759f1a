// SPDX-License-Identifier: Apache-2.0
// BFDOT of Armv8.6; machines that have it have the NEON kernel too, which serves the other types.
#define RELAY_NEON

#include "run_kernel.h"
#include "vector_kernel.h"

void relay::attention_neon_bf16(const Problem& problem, const Plan& plan) {
  run_kernel<BFloat16, VectorKernel<BFloat16>>(problem, plan);
}

void relay::attention_neon_bf16(const Problem& problem, const Unpacked& unpacked) {
  run_kernel<BFloat16, VectorKernel<BFloat16>>(problem, unpacked);
}

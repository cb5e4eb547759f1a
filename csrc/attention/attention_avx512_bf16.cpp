// SPDX-License-Identifier: Apache-2.0
#include "driver.h"
#include "kernels.h"
#include "unpacked_driver.h"
#include "vector_kernel.h"

// Machines with bf16 products have AVX-512 too, whose kernel serves the other types.
void relay::attention_avx512_bf16(const Problem& problem, const Plan& plan) {
  Driver<BFloat16, VectorKernel<BFloat16>>(problem, plan).run();
}

void relay::attention_avx512_bf16(const Problem& problem, const Unpacked& unpacked) {
  UnpackedDriver<BFloat16, VectorKernel<BFloat16>>(problem, unpacked).run();
}

// SPDX-License-Identifier: Apache-2.0
// BFDOT of Armv8.6; machines that have it have the NEON kernel too, which serves the other types.
#define RELAY_NEON

#include "driver.h"
#include "kernels.h"
#include "unpacked_driver.h"
#include "vector_kernel.h"

void relay::attention_neon_bf16(const Problem& problem, const Plan& plan) {
  Driver<BFloat16, VectorKernel<BFloat16>>(problem, plan).run();
}

void relay::attention_neon_bf16(const Problem& problem, const Unpacked& unpacked) {
  UnpackedDriver<BFloat16, VectorKernel<BFloat16>>(problem, unpacked).run();
}

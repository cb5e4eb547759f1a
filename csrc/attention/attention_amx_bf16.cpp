// SPDX-License-Identifier: Apache-2.0
#include "amx_kernel.h"
#include "driver.h"
#include "kernels.h"

void relay::attention_amx_bf16(const Problem& problem, const Plan& plan) {
  Driver<BFloat16, AmxKernel>(problem, plan).run();
}

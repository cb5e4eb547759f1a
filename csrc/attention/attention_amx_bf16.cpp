// SPDX-License-Identifier: Apache-2.0
#include "amx_kernel.h"
#include "driver.h"
#include "kernels.h"
#include "unpacked_driver.h"

void relay::attention_amx_bf16(const Problem& problem, const Plan& plan) {
  Driver<BFloat16, AmxKernel>(problem, plan).run();
}

void relay::attention_amx_bf16(const Problem& problem, const Unpacked& unpacked) {
  UnpackedDriver<BFloat16, AmxKernel>(problem, unpacked).run();
}

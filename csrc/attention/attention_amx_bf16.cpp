// SPDX-License-Identifier: Apache-2.0
#include "amx_kernel.h"
#include "run_kernel.h"

void relay::attention_amx_bf16(const Problem& problem, const Plan& plan) {
  run_kernel<BFloat16, AmxKernel>(problem, plan);
}

void relay::attention_amx_bf16(const Problem& problem, const Unpacked& unpacked) {
  run_kernel<BFloat16, AmxKernel>(problem, unpacked);
}

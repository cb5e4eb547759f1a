// SPDX-License-Identifier: Apache-2.0
// The AMX kernel on tiles in memory: lets every machine with AVX-512 test it.
#define RELAY_EMULATE_TILES

#include "amx_kernel.h"
#include "run_kernel.h"

void relay::attention_amx_bf16_emulated(const Problem& problem, const Plan& plan) {
  run_kernel<BFloat16, AmxKernel>(problem, plan);
}

void relay::attention_amx_bf16_emulated(const Problem& problem, const Unpacked& unpacked) {
  run_kernel<BFloat16, AmxKernel>(problem, unpacked);
}

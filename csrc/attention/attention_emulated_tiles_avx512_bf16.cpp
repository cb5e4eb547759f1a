// SPDX-License-Identifier: Apache-2.0
// The AMX kernel on tiles in memory: lets every machine with AVX-512 BF16 test it.
#define RELAY_EMULATE_TILES

#include "amx_kernel.h"
#include "driver.h"
#include "kernels.h"
#include "unpacked_driver.h"

void relay::attention_amx_bf16_emulated(const Problem& problem, const Plan& plan) {
  Driver<BFloat16, AmxKernel>(problem, plan).run();
}

void relay::attention_amx_bf16_emulated(const Problem& problem, const Unpacked& unpacked) {
  UnpackedDriver<BFloat16, AmxKernel>(problem, unpacked).run();
}

// SPDX-License-Identifier: Apache-2.0
#define RELAY_NEON

#include "vector_entry.h"

void relay::attention_neon(const Problem& problem, const Plan& plan) {
  run_vector_kernel(problem, plan);
}

void relay::attention_neon(const Problem& problem, const Unpacked& unpacked) {
  run_vector_kernel(problem, unpacked);
}

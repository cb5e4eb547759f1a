// SPDX-License-Identifier: Apache-2.0
// A kernel over what a problem has: a KV cache of its own type or of float8, or tokens in none.
#pragma once

#include "driver.h"
#include "float8_kernel.h"
#include "kernels.h"
#include "unpacked_driver.h"

namespace relay {
namespace {

template <class T, class Kernel>
void run_kernel(const Problem& problem, const Plan& plan) {
  if (problem.is_float8)
    Driver<T, Float8Kernel<T, Kernel>>(problem, plan).run();
  else
    Driver<T, Kernel>(problem, plan).run();
}

template <class T, class Kernel>
void run_kernel(const Problem& problem, const Unpacked& unpacked) {
  UnpackedDriver<T, Kernel>(problem, unpacked).run();
}

}  // namespace
}  // namespace relay

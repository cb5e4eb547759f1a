// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "driver.h"
#include "kernels.h"
#include "vector_kernel.h"

namespace relay {
namespace {

void run_vector_kernel(const Problem& problem, const Plan& plan) {
  switch (problem.dtype) {
    case DType::kFloat32:
      return Driver<float, VectorKernel<float>>(problem, plan).run();
    case DType::kFloat16:
      return Driver<Float16, VectorKernel<Float16>>(problem, plan).run();
    case DType::kBFloat16:
      return Driver<BFloat16, VectorKernel<BFloat16>>(problem, plan).run();
  }
}

}  // namespace
}  // namespace relay

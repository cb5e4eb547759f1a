// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "driver.h"
#include "kernels.h"
#include "unpacked_driver.h"
#include "vector_kernel.h"

namespace relay {
namespace {

template <template <class, class> class AnyDriver, class Work>
void run_with_type(const Problem& problem, const Work& work) {
  switch (problem.dtype) {
    case DType::kFloat32:
      return AnyDriver<float, VectorKernel<float>>(problem, work).run();
    case DType::kFloat16:
      return AnyDriver<Float16, VectorKernel<Float16>>(problem, work).run();
    case DType::kBFloat16:
      return AnyDriver<BFloat16, VectorKernel<BFloat16>>(problem, work).run();
  }
}

void run_vector_kernel(const Problem& problem, const Plan& plan) {
  run_with_type<Driver>(problem, plan);
}

void run_vector_kernel(const Problem& problem, const Unpacked& unpacked) {
  run_with_type<UnpackedDriver>(problem, unpacked);
}

}  // namespace
}  // namespace relay

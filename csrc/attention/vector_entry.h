// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "run_kernel.h"
#include "vector_kernel.h"

namespace relay {
namespace {

// `work` is a Plan or an Unpacked.
template <class Work>
void run_vector_kernel(const Problem& problem, const Work& work) {
  switch (problem.dtype) {
    case DType::kFloat32:
      return run_kernel<float, VectorKernel<float>>(problem, work);
    case DType::kFloat16:
      return run_kernel<Float16, VectorKernel<Float16>>(problem, work);
    case DType::kBFloat16:
      return run_kernel<BFloat16, VectorKernel<BFloat16>>(problem, work);
  }
}

}  // namespace
}  // namespace relay

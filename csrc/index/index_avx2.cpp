// SPDX-License-Identifier: Apache-2.0
#include "../common/cpu_features.h"
#include "entry.h"

namespace relay::index {
extern const IndexKernels kIndexKernelsAvx2;
constinit const IndexKernels kIndexKernelsAvx2 =
    kernels_named("avx2", [] { return cpu_features().avx2; });
}  // namespace relay::index

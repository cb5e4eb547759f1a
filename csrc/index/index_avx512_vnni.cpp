// SPDX-License-Identifier: Apache-2.0
#include "../common/cpu_features.h"
#include "entry.h"

namespace relay::index {
extern const IndexKernels kIndexKernelsAvx512Vnni;
constinit const IndexKernels kIndexKernelsAvx512Vnni =
    kernels_named("avx512_vnni", [] { return cpu_features().avx512_vnni; });
}  // namespace relay::index

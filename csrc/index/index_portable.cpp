// SPDX-License-Identifier: Apache-2.0
#include "entry.h"

namespace relay::index {
extern const IndexKernels kIndexKernelsPortable;
constinit const IndexKernels kIndexKernelsPortable = kernels_named("portable", [] { return true; });
}  // namespace relay::index

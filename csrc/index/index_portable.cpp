// SPDX-License-Identifier: Apache-2.0
#include "entry.h"

namespace relay::index {
extern const IndexKernels kIndexKernelsPortable;
const IndexKernels kIndexKernelsPortable = {"portable",   [] { return true; }, encode,
                                            nearest,      build_graph,         scan,
                                            search_lists, search_graph};
}  // namespace relay::index

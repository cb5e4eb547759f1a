// SPDX-License-Identifier: Apache-2.0
#include "entry.h"

namespace relay::index {
extern const IndexKernels kIndexKernelsPortable;
const IndexKernels kIndexKernelsPortable = {
    "portable",        [] { return true; }, encode,    nearest,      refine_candidates,
    encode_query_only, build_graph,         scan,      search_lists, search_blocks,
    search_graph,      score_range,         mean_rows, attend_found, attend_ids};
}  // namespace relay::index

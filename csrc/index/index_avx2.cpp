// SPDX-License-Identifier: Apache-2.0
#include "../common/cpu_features.h"
#include "entry.h"

namespace relay::index {
extern const IndexKernels kIndexKernelsAvx2;
const IndexKernels kIndexKernelsAvx2 = {"avx2",
                                        [] { return cpu_features().avx2; },
                                        encode,
                                        nearest,
                                        refine_candidates,
                                        encode_query_only,
                                        build_graph,
                                        scan,
                                        search_lists,
                                        search_blocks,
                                        search_graph,
                                        score_range,
                                        mean_rows,
                                        attend_found,
                                        attend_ids};
}  // namespace relay::index

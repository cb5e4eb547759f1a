// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "candidate_scan.h"

namespace relay::index {
namespace {

// A scan of blocks of whole codes for queries whose codes are in `scratch`: any number of `read`,
// then `finish`.
class BlockScan : CandidateScan {
 public:
  BlockScan(const Codes& codes, const CodeBlocks& blocks, const Rows& keys, const int32_t* ids,
            bool exact, const SearchRequest& request, ScanScratch& scratch, SearchOutcome& outcome)
      : CandidateScan(codes, keys, ids, exact, request, scratch, outcome), blocks_(blocks) {
    reset_lists(scratch.forms);
  }

  void read(std::span<const BlockRange> ranges) {
    for (const BlockRange& range : ranges)
      multiply(blocks_, range,
               [&](int q, auto num, int64_t block, auto count, const int32_t* scores,
                   uint64_t valid) { offer_all<num(), count()>(q, scores, block, valid); });
  }

  void finish() {
    for (int q = 0; q < request_.num_queries; ++q) {
      scratch_.lists[q].shrink(!exact_);
      score_answers(q, scratch_.forms[q]);
      keep_answers(request_, q, outcome_.found[q]);
    }
  }

 private:
  const CodeBlocks blocks_;
};

}  // namespace
}  // namespace relay::index

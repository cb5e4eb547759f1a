// SPDX-License-Identifier: Apache-2.0
// Scans of code blocks for the queries of a group: every block is read once for all of them. What
// looks good by its codes are candidates, of which exact scores make answers.
#pragma once

#include "aligned_vector.h"
#include "candidate_list.h"
#include "dropped_mass.h"
#include "query_code.h"
#include "rescore.h"
#include "unread_weight.h"

namespace relay::index {
namespace {

struct ScanScratch {
  AlignedVector<int8_t> query_codes;
  std::vector<QueryCode> forms, upper_forms;
  std::vector<CandidateList> lists;
  std::vector<int32_t> ids, always;
  std::vector<Found> exact, missed;
  std::vector<Remainder> remainders;
  std::vector<UnreadWeight> unread;

  void encode(const float* queries, int num_queries, const Codes& codes) {
    query_codes.resize(static_cast<size_t>(num_queries) * codes.stride);
    forms.resize(num_queries);
    upper_forms.resize(num_queries);
    if (static_cast<int>(lists.size()) < num_queries) lists.resize(num_queries);
    for (int q = 0; q < num_queries; ++q)
      forms[q] = encode_query(queries + static_cast<int64_t>(q) * codes.size, codes,
                              query_codes.data() + static_cast<int64_t>(q) * codes.stride,
                              &upper_forms[q]);
  }
};

inline int32_t to_steps(double score, double unit) {
  return static_cast<int32_t>(std::clamp(std::ceil(score / unit), -1e9, 1e9));
}

// The lowest exact score that can still be an answer, now that `found` is known.
inline double least_answer(const SearchRequest& request, int query, std::vector<Found>& found) {
  if (request.k) {
    if (found.size() < static_cast<size_t>(request.k)) return -INFINITY;
    std::nth_element(found.begin(), found.begin() + request.k - 1, found.end(), better);
    return found[request.k - 1].score;
  }
  return least_in_range(request, query, found);
}

constexpr int64_t kProbed = 8;  // candidates whose exact scores tell where a range ends

class CandidateScan {
 public:
  // `ids` maps positions to keys (null: they are the same). With `exact`, what is found in the
  // blocks that are read is certain: candidates reach as far down as rounding can possibly deceive.
  CandidateScan(const Codes& codes, const Rows& keys, const int32_t* ids, bool exact,
                const SearchRequest& request, ScanScratch& scratch, SearchOutcome& outcome)
      : codes_(codes),
        keys_(keys),
        ids_(ids),
        exact_(exact),
        request_(request),
        scratch_(scratch),
        outcome_(outcome) {
    scratch_.always.clear();
    for (int32_t a = 0; a < request_.num_always; ++a)
      if (counts(request_, request_.always[a])) scratch_.always.push_back(request_.always[a]);
    outcome_.found.resize(request_.num_queries);
  }

 protected:
  // Empty lists for scores of these forms. Where it is not exact, a range reaches `range_errors`
  // rounding errors further.
  void reset_lists(const std::vector<QueryCode>& forms, double range_errors = kRangeErrors) {
    for (int q = 0; q < request_.num_queries; ++q) {
      const QueryCode& form = forms[q];
      const double slack = exact_ ? 2 * form.largest_error : range_errors * form.error;
      if (request_.k) {
        scratch_.lists[q].reset_best(
            exact_ ? request_.k : static_cast<int32_t>(num_rescored(request_.k)),
            exact_ ? to_steps(slack, form.unit) : 0);
      } else {
        const double elsewhere = request_.window_max ? request_.window_max[q] : -INFINITY;
        const double reach = request_.range + slack;
        scratch_.lists[q].reset_range(to_steps(reach, form.unit),
                                      to_steps(elsewhere - form.offset - reach, form.unit) - 1);
      }
    }
  }

  // Exact scores of the candidates that can be answers, whose scores are of `form`. The first ones
  // up to what is returned have one.
  const Candidate* score_answers(int q, const QueryCode& form) {
    CandidateList& list = scratch_.lists[q];
    std::vector<Found>& found = outcome_.found[q];
    found.clear();
    score_exactly(query(q), keys_, scratch_.always, found);
    if (!exact_) {
      score_candidates(q, list.begin(), list.end());
      return list.end();
    }
    // the exact scores of the first ones tell which others can still be answers
    Candidate* first =
        list.begin() + std::min<int64_t>(list.count(), request_.k ? request_.k : kProbed);
    if (first < list.end()) std::nth_element(list.begin(), first, list.end(), better_candidate);
    score_candidates(q, list.begin(), first);
    const double least = least_answer(request_, q, found) - form.largest_error;
    const double step = std::floor((least - form.offset) / form.unit);
    Candidate* const scored =
        std::partition(first, list.end(), [&](const Candidate& c) { return c.score >= step; });
    score_candidates(q, first, scored);
    return scored;
  }

  void score_candidates(int q, const Candidate* from, const Candidate* to) {
    scratch_.ids.clear();
    for (const Candidate* c = from; c < to; ++c)
      scratch_.ids.push_back(ids_ ? ids_[c->position] : c->position);
    if (!std::is_sorted(scratch_.ids.begin(), scratch_.ids.end()))
      std::sort(scratch_.ids.begin(), scratch_.ids.end());
    score_exactly(query(q), keys_, scratch_.ids, outcome_.found[q]);
    outcome_.rescored += to - from;
  }

  template <int Queries, int NumBlocks>
  void offer_all(int first_query, const int32_t* scores, int64_t block, uint64_t valid) {
    for (int i = 0; i < Queries; ++i)
      offer<NumBlocks>(scratch_.lists[first_query + i], scores + i * NumBlocks * kBlockKeys,
                       block * kBlockKeys, valid);
  }

  const float* query(int q) const {
    return request_.queries + static_cast<int64_t>(q) * keys_.size;
  }

  // Calls `take(query, queries, block, blocks, scores, valid)` with the products of the blocks of a
  // range (`for_each_product`) and the lanes of them that count.
  template <bool UpperHalves, class Take>
  void multiply(const Blocks<UpperHalves>& blocks, const BlockRange& range, Take&& take) {
    const int64_t num_blocks = (range.num_keys + kBlockKeys - 1) / kBlockKeys;
    const int64_t end = range.first_block * kBlockKeys + range.num_keys;
    if (codes_.guard)
      codes_.guard->verify(static_cast<size_t>(range.first_block),
                           static_cast<size_t>(range.first_block + num_blocks));
    for_each_product(blocks, range.first_block, num_blocks, scratch_.query_codes.data(),
                     codes_.stride, request_.num_queries,
                     [&](int q, auto num, int64_t block, auto count, int32_t* scores) {
                       uint64_t valid = first_lanes(end - block * kBlockKeys);
                       if (block == range.first_block) valid &= ~uint64_t{range.skip};
                       take(q, num, block, count, scores, valid);
                     });
    outcome_.distances += range.num_keys;
    outcome_.code_bytes += num_blocks * blocks.block_bytes();
    ++outcome_.hops;
  }

  const Codes& codes_;
  const Rows& keys_;
  const int32_t* const ids_;
  const bool exact_;
  const SearchRequest& request_;
  ScanScratch& scratch_;
  SearchOutcome& outcome_;
};

}  // namespace
}  // namespace relay::index

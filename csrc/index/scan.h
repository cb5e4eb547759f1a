// SPDX-License-Identifier: Apache-2.0
// Scans of code blocks for the queries of a group: every block is read once for all of them.
#pragma once

#include "aligned_vector.h"
#include "candidate_list.h"
#include "code_blocks.h"
#include "dropped_mass.h"
#include "query_code.h"

namespace relay::index {
namespace {

struct ScanScratch {
  AlignedVector<int8_t> query_codes;
  std::vector<QueryCode> forms;
  std::vector<CandidateList> lists;
  std::vector<int32_t> ids, always;
  std::vector<Remainder> remainders;

  void encode(const float* queries, int num_queries, const Codes& codes) {
    query_codes.resize(static_cast<size_t>(num_queries) * codes.stride);
    forms.resize(num_queries);
    if (static_cast<int>(lists.size()) < num_queries) lists.resize(num_queries);
    for (int q = 0; q < num_queries; ++q)
      forms[q] = encode_query(queries + static_cast<int64_t>(q) * codes.size, codes,
                              query_codes.data() + static_cast<int64_t>(q) * codes.stride);
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
  double best = request.window_max ? request.window_max[query] : -INFINITY;
  for (const Found& f : found) best = std::max<double>(best, f.score);
  return best - request.range;
}

constexpr int64_t kProbed = 8;  // candidates whose exact scores tell where a range ends

// Scans `ranges` of blocks; `scratch` holds the codes of the queries. `ids` maps positions to keys
// (null: they are the same). With `exact`, what is found is certain: candidates reach as far down
// as rounding can possibly deceive.
inline void scan_ranges(const Codes& codes, const CodeBlocks& blocks, const Rows& keys,
                        const int32_t* ids, std::span<const BlockRange> ranges, bool exact,
                        const SearchRequest& request, ScanScratch& scratch,
                        SearchOutcome& outcome) {
  const bool certify = exact && request.scale > 0;
  if (certify) {
    const int64_t end =
        ranges.empty() ? 0 : ranges.back().first_block * kBlockKeys + ranges.back().num_keys;
    scratch.remainders.resize(request.num_queries);
    for (Remainder& remainder : scratch.remainders) remainder.reset(end);
    outcome.dropped_mass.resize(request.num_queries);
  }
  for (int q = 0; q < request.num_queries; ++q) {
    const QueryCode& form = scratch.forms[q];
    const double slack = exact ? 2 * form.largest_error : kRangeErrors * form.error;
    if (request.k) {
      scratch.lists[q].reset_best(exact ? request.k : static_cast<int32_t>(num_rescored(request.k)),
                                  exact ? to_steps(slack, form.unit) : 0);
    } else {
      const double elsewhere = request.window_max ? request.window_max[q] : -INFINITY;
      const double reach = request.range + slack;
      scratch.lists[q].reset_range(to_steps(reach, form.unit),
                                   to_steps(elsewhere - form.offset - reach, form.unit) - 1);
    }
  }
  for (const BlockRange& range : ranges) {
    const int64_t num_blocks = (range.num_keys + kBlockKeys - 1) / kBlockKeys;
    const int64_t end = range.first_block * kBlockKeys + range.num_keys;
    if (codes.guard)
      codes.guard->verify(static_cast<size_t>(range.first_block),
                          static_cast<size_t>(range.first_block + num_blocks));
    for_each_product(
        blocks, range.first_block, num_blocks, scratch.query_codes.data(), codes.stride,
        request.num_queries, [&](int q, int64_t block, auto count, const int32_t* scores) {
          uint64_t valid = first_lanes(end - block * kBlockKeys);
          if (block == range.first_block) valid &= ~uint64_t{range.skip};
          offer<count()>(scratch.lists[q], scores, block * kBlockKeys, valid);
          if (certify)
            for (int b = 0; b < count(); ++b)
              scratch.remainders[q].add(scores + b * kBlockKeys, block + b,
                                        static_cast<uint32_t>(valid >> b * kBlockKeys) & 0xffffu);
        });
    outcome.distances += range.num_keys;
    ++outcome.hops;
  }
  scratch.always.clear();
  for (int32_t a = 0; a < request.num_always; ++a)
    if (counts(request, request.always[a])) scratch.always.push_back(request.always[a]);
  outcome.found.resize(request.num_queries);
  for (int q = 0; q < request.num_queries; ++q) {
    CandidateList& list = scratch.lists[q];
    list.shrink(!exact);
    const float* query = request.queries + static_cast<int64_t>(q) * keys.size;
    std::vector<Found>& found = outcome.found[q];
    found.clear();
    const auto score_candidates = [&](const Candidate* from, const Candidate* to) {
      scratch.ids.clear();
      for (const Candidate* c = from; c < to; ++c)
        scratch.ids.push_back(ids ? ids[c->position] : c->position);
      std::sort(scratch.ids.begin(), scratch.ids.end());
      score_exactly(query, keys, scratch.ids, found);
      outcome.rescored += to - from;
    };
    score_exactly(query, keys, scratch.always, found);
    Candidate* scored = list.begin();
    if (exact) {
      // the exact scores of the first ones tell which others can still be answers
      scored += std::min<int64_t>(list.count(), request.k ? request.k : kProbed);
      if (scored < list.end()) std::nth_element(list.begin(), scored, list.end(), better_candidate);
      score_candidates(list.begin(), scored);
      const double least = least_answer(request, q, found) - scratch.forms[q].largest_error;
      const double step = std::floor((least - scratch.forms[q].offset) / scratch.forms[q].unit);
      Candidate* const end =
          std::partition(scored, list.end(), [&](const Candidate& c) { return c.score >= step; });
      score_candidates(scored, end);
      scored = end;
    } else {
      score_candidates(list.begin(), list.end());
      scored = list.end();
    }
    if (certify) {
      Remainder& remainder = scratch.remainders[q];
      for (const Candidate* c = list.begin(); c < scored; ++c) remainder.remove(c->position);
      outcome.dropped_mass[q] = bound_dropped_mass(request, q, keys, scratch.forms[q], remainder,
                                                   outcome.found[q], outcome.rescored);
    } else {
      keep_answers(request, q, outcome.found[q]);
    }
  }
}

}  // namespace
}  // namespace relay::index

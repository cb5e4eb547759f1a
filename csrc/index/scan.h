// SPDX-License-Identifier: Apache-2.0
// Scans of code blocks for the queries of a group: every block is read once for all of them.
#pragma once

#include "aligned_vector.h"
#include "candidate_list.h"
#include "code_blocks.h"
#include "dropped_mass.h"
#include "query_code.h"
#include "unread_weight.h"

namespace relay::index {
namespace {

struct ScanScratch {
  AlignedVector<int8_t> query_codes;
  std::vector<QueryCode> forms;
  std::vector<CandidateList> lists;
  std::vector<int32_t> ids, always;
  std::vector<Remainder> remainders;
  std::vector<UnreadWeight> unread;

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
  return least_in_range(request, query, found);
}

constexpr int64_t kProbed = 8;  // candidates whose exact scores tell where a range ends

// A scan of blocks for queries whose codes are in `scratch`: any number of `read`, then `finish`.
class BlockScan {
 public:
  // `ids` maps positions to keys (null: they are the same). With `exact`, what is found in the
  // blocks that are read is certain: candidates reach as far down as rounding can possibly deceive.
  BlockScan(const Codes& codes, const CodeBlocks& blocks, const Rows& keys, const int32_t* ids,
            bool exact, const SearchRequest& request, ScanScratch& scratch, SearchOutcome& outcome)
      : codes_(codes),
        blocks_(blocks),
        keys_(keys),
        ids_(ids),
        exact_(exact),
        request_(request),
        scratch_(scratch),
        outcome_(outcome) {
    for (int q = 0; q < request.num_queries; ++q) {
      const QueryCode& form = scratch.forms[q];
      const double slack = exact ? 2 * form.largest_error : kRangeErrors * form.error;
      if (request.k) {
        scratch.lists[q].reset_best(
            exact ? request.k : static_cast<int32_t>(num_rescored(request.k)),
            exact ? to_steps(slack, form.unit) : 0);
      } else {
        const double elsewhere = request.window_max ? request.window_max[q] : -INFINITY;
        const double reach = request.range + slack;
        scratch.lists[q].reset_range(to_steps(reach, form.unit),
                                     to_steps(elsewhere - form.offset - reach, form.unit) - 1);
      }
    }
  }
  // Also bounds what is left out of the `num_positions` first keys, which are all read.
  void certify(int64_t num_positions) {
    certified_ = true;
    scratch_.remainders.resize(request_.num_queries);
    for (Remainder& remainder : scratch_.remainders) remainder.reset(num_positions);
    outcome_.dropped_mass.resize(request_.num_queries);
  }

  // Also sums up what is not found of all keys, which are read in their order.
  void weigh_unread() {
    weighs_unread_ = true;
    if (static_cast<int>(scratch_.unread.size()) < request_.num_queries)
      scratch_.unread.resize(request_.num_queries);
    for (int q = 0; q < request_.num_queries; ++q)
      scratch_.unread[q].reset(scratch_.forms[q], request_.scale, keys_.num_rows,
                               request_.window_max ? request_.window_max[q] : -INFINITY);
    outcome_.unread.resize(request_.num_queries);
  }

  void read(std::span<const BlockRange> ranges) {
    const bool certified = certified_, weighs_unread = weighs_unread_;
    for (const BlockRange& range : ranges) {
      const int64_t num_blocks = (range.num_keys + kBlockKeys - 1) / kBlockKeys;
      const int64_t end = range.first_block * kBlockKeys + range.num_keys;
      if (codes_.guard)
        codes_.guard->verify(static_cast<size_t>(range.first_block),
                             static_cast<size_t>(range.first_block + num_blocks));
      for_each_product(blocks_, range.first_block, num_blocks, scratch_.query_codes.data(),
                       codes_.stride, request_.num_queries,
                       [&](int q, int64_t block, auto count, const int32_t* scores) {
                         uint64_t valid = first_lanes(end - block * kBlockKeys);
                         if (block == range.first_block) valid &= ~uint64_t{range.skip};
                         offer<count()>(scratch_.lists[q], scores, block * kBlockKeys, valid);
                         if (weighs_unread) scratch_.unread[q].add<count()>(scores, block, valid);
                         if (certified)
                           for (int b = 0; b < count(); ++b)
                             scratch_.remainders[q].add(
                                 scores + b * kBlockKeys, block + b,
                                 static_cast<uint32_t>(valid >> b * kBlockKeys) & 0xffffu);
                       });
      outcome_.distances += range.num_keys;
      ++outcome_.hops;
    }
  }

  void finish() {
    scratch_.always.clear();
    for (int32_t a = 0; a < request_.num_always; ++a)
      if (counts(request_, request_.always[a])) scratch_.always.push_back(request_.always[a]);
    outcome_.found.resize(request_.num_queries);
    for (int q = 0; q < request_.num_queries; ++q) finish(q);
  }

 private:
  void finish(int q) {
    CandidateList& list = scratch_.lists[q];
    list.shrink(!exact_);
    const QueryCode& form = scratch_.forms[q];
    std::vector<Found>& found = outcome_.found[q];
    found.clear();
    score_exactly(query(q), keys_, scratch_.always, found);
    Candidate* scored = list.end();
    if (exact_) {
      // the exact scores of the first ones tell which others can still be answers
      Candidate* first =
          list.begin() + std::min<int64_t>(list.count(), request_.k ? request_.k : kProbed);
      if (first < list.end()) std::nth_element(list.begin(), first, list.end(), better_candidate);
      score_candidates(q, list.begin(), first);
      const double least = least_answer(request_, q, found) - form.largest_error;
      const double step = std::floor((least - form.offset) / form.unit);
      scored =
          std::partition(first, list.end(), [&](const Candidate& c) { return c.score >= step; });
      score_candidates(q, first, scored);
    } else {
      score_candidates(q, list.begin(), scored);
    }
    if (certified_) {
      Remainder& remainder = scratch_.remainders[q];
      for (const Candidate* c = list.begin(); c < scored; ++c) remainder.remove(c->position);
      outcome_.dropped_mass[q] = bound_dropped_mass(request_, q, keys_, scratch_.always, form,
                                                    remainder, found, outcome_.rescored);
    } else {
      if (weighs_unread_)
        weigh_unread(q, list.begin(), scored, found);
      else
        keep_answers(request_, q, found);
    }
  }

  // Leaves the answers in the order of the keys: who attends all of them needs no other. What else
  // was scored exactly counts by these scores.
  void weigh_unread(int q, const Candidate* from, const Candidate* to, std::vector<Found>& found) {
    UnreadWeight& unread = scratch_.unread[q];
    unread.remove(from, to);
    const float least = least_in_range(request_, q, found);
    std::erase_if(found, [&](const Found& f) {
      if (f.score < least) unread.put_back(f.id, f.score);
      return f.score < least;
    });
    unread.take(request_.begin, request_.prefix_len, keys_.num_rows, outcome_.unread[q]);
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

  const float* query(int q) const {
    return request_.queries + static_cast<int64_t>(q) * keys_.size;
  }

  const Codes& codes_;
  const CodeBlocks blocks_;
  const Rows& keys_;
  const int32_t* const ids_;
  const bool exact_;
  const SearchRequest& request_;
  ScanScratch& scratch_;
  SearchOutcome& outcome_;
  bool certified_ = false, weighs_unread_ = false;
};

}  // namespace
}  // namespace relay::index

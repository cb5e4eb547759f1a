// SPDX-License-Identifier: Apache-2.0
// A scan of all keys in their order. Where the unread is weighed, by the upper halves of their
// codes, and the lower ones of candidates only; otherwise exact, by whole codes.
#pragma once

#include "candidate_scan.h"

namespace relay::index {
namespace {

// Keys that weigh less than this share of the best, and less than so many times what is at the end
// of the range, are attended by the scores of their codes.
constexpr double kLightWeight = 0.01, kLightOverLeast = 50;
// Where scores by upper halves are off by more, in the exponent of the softmax and as a standard
// deviation, what is not read is weighed by whole codes.
constexpr double kLargestUpperError = 1;

template <int Chunks>
class SplitScan : CandidateScan {
 public:
  SplitScan(const Codes& codes, const SplitCodes& split, const Rows& keys,
            const SearchRequest& request, ScanScratch& scratch, SearchOutcome& outcome)
      : CandidateScan(codes, keys, nullptr, !request.weighs_unread, request, scratch, outcome),
        split_(split) {}

  void run(std::span<const BlockRange> ranges) {
    if (request_.weighs_unread)
      weigh_unread(ranges);
    else
      search(ranges);
  }

 private:
  // Reads whole codes: what upper halves can be off by at most reaches too far down.
  void search(std::span<const BlockRange> ranges) {
    const bool bounds = !std::isnan(request_.max_dropped_mass);
    if (bounds) {
      const int64_t num_positions =
          ranges.empty() ? 0 : ranges.back().first_block * kBlockKeys + ranges.back().num_keys;
      scratch_.remainders.resize(request_.num_queries);
      for (Remainder& remainder : scratch_.remainders) remainder.reset(num_positions);
      outcome_.dropped_mass.resize(request_.num_queries);
    }
    reset_lists(scratch_.forms);
    interleave();
    for (const BlockRange& range : ranges)
      multiply(upper(), range,
               [&](int q, auto num, int64_t block, auto count, int32_t* scores, uint64_t valid) {
                 add_lower_halves<num(), count()>(q, block, scores);
                 offer_all<num(), count()>(q, scores, block, valid);
                 for (int i = 0; i < num() && bounds; ++i)
                   for (int b = 0; b < count(); ++b)
                     scratch_.remainders[q + i].add(
                         scores + (i * count() + b) * kBlockKeys, block + b,
                         static_cast<uint32_t>(valid >> b * kBlockKeys) & 0xffffu);
               });
    for (int q = 0; q < request_.num_queries; ++q) {
      CandidateList& list = scratch_.lists[q];
      list.shrink();
      const Candidate* const scored = score_answers(q, scratch_.forms[q]);
      if (!bounds) {
        keep_answers(request_, q, outcome_.found[q]);
        continue;
      }
      Remainder& remainder = scratch_.remainders[q];
      for (const Candidate* c = list.begin(); c < scored; ++c) remainder.remove(c->position);
      outcome_.dropped_mass[q] =
          bound_dropped_mass(request_, q, keys_, scratch_.always, scratch_.forms[q], remainder,
                             outcome_.found[q], outcome_.rescored);
    }
  }

  // Also sums up what is not found. Leaves the answers in the order of the keys: who attends all of
  // them needs no other. What is off at the end of a range counts all the same, so that candidates
  // need not reach far below it.
  void weigh_unread(std::span<const BlockRange> ranges) {
    std::vector<QueryCode>& forms = scratch_.upper_forms;
    std::vector<char> reads_whole(request_.num_queries);
    for (int q = 0; q < request_.num_queries; ++q) {
      reads_whole[q] = request_.scale * forms[q].error > kLargestUpperError;
      if (reads_whole[q]) forms[q] = scratch_.forms[q];
    }
    reset_lists(forms, 1);
    if (static_cast<int>(scratch_.unread.size()) < request_.num_queries)
      scratch_.unread.resize(request_.num_queries);
    for (int q = 0; q < request_.num_queries; ++q)
      scratch_.unread[q].reset(forms[q], request_.scale, keys_.num_rows,
                               request_.window_max ? request_.window_max[q] : -INFINITY);
    outcome_.unread.resize(request_.num_queries);
    interleave();
    for (const BlockRange& range : ranges)
      multiply(upper(), range,
               [&](int q, auto num, int64_t block, auto count, int32_t* scores, uint64_t valid) {
                 constexpr int kScores = count() * kBlockKeys;
                 bool any_whole = false;
                 for (int i = 0; i < num(); ++i) any_whole |= reads_whole[q + i];
                 if (any_whole) {
                   int32_t uppers[num() * kScores];
                   std::copy_n(scores, num() * kScores, uppers);
                   add_lower_halves<num(), count()>(q, block, scores);
                   for (int i = 0; i < num(); ++i)
                     if (!reads_whole[q + i])
                       std::copy_n(uppers + i * kScores, kScores, scores + i * kScores);
                 }
                 offer_all<num(), count()>(q, scores, block, valid);
                 for (int i = 0; i < num(); ++i)
                   scratch_.unread[q + i].template add<count()>(scores + i * kScores, block, valid,
                                                                scratch_.lists[q + i].best());
               });
    for (int q = 0; q < request_.num_queries; ++q) {
      scratch_.lists[q].shrink();
      UnreadWeight& unread = scratch_.unread[q];
      unread.remove(scratch_.lists[q].begin(), scratch_.lists[q].end());
      if (!reads_whole[q]) add_lower_halves(q);
      take_range(q, unread);
      unread.take(request_.begin, request_.prefix_len, keys_.num_rows, outcome_.unread[q]);
    }
  }

  // Candidates in range, in the order of the keys; of those that weigh much, exact scores.
  void take_range(int q, UnreadWeight& unread) {
    const QueryCode& form = scratch_.forms[q];
    const CandidateList& list = scratch_.lists[q];
    const auto score_of = [&](int32_t code) { return form.offset + form.unit * code; };
    int32_t best_code = INT_MIN;
    for (const Candidate& c : list) best_code = std::max(best_code, c.score);
    double best = request_.window_max ? request_.window_max[q] : -INFINITY;
    if (list.count()) best = std::max(best, score_of(best_code));
    const double heavy =
        best + std::min(std::log(kLightWeight) / request_.scale,
                        std::log(kLightOverLeast) / request_.scale - request_.range);

    std::vector<Found>& exact = scratch_.exact;
    exact.clear();
    score_exactly(query(q), keys_, scratch_.always, exact);
    const auto num_always = static_cast<std::ptrdiff_t>(exact.size());
    scratch_.ids.resize(list.count());
    size_t num_heavy = 0;
    for (const Candidate& c : list) {
      scratch_.ids[num_heavy] = c.position;
      num_heavy += score_of(c.score) >= heavy;
    }
    score_exactly(query(q), keys_, std::span(scratch_.ids).first(num_heavy), exact);
    outcome_.rescored += static_cast<int64_t>(num_heavy);

    const auto least = static_cast<float>(least_in_range(request_, q, exact));
    std::vector<Found>& found = outcome_.found[q];
    std::vector<Found>& missed = scratch_.missed;
    found.resize(static_cast<size_t>(num_always + list.count()));
    missed.resize(found.size());
    size_t count = 0, num_missed = 0;
    const auto take = [&](const Found& each) {
      found[count] = each;
      missed[num_missed] = each;
      const bool is_in_range = each.score >= least;
      count += is_in_range;
      num_missed += !is_in_range;
    };
    const Found* scored = exact.data();
    for (; scored < exact.data() + num_always; ++scored) take(*scored);
    const auto middle = static_cast<std::ptrdiff_t>(count);
    for (const Candidate& c : list) {
      const double score = score_of(c.score);
      take(score >= heavy ? *scored++ : Found{c.position, static_cast<float>(score)});
    }
    unread.put_back(std::span(missed).first(num_missed));
    found.resize(count);
    std::inplace_merge(found.begin(), found.begin() + middle, found.end(),
                       [](const Found& a, const Found& b) { return a.id < b.id; });
  }

  UpperBlocks upper() const { return {split_.upper, codes_.stride}; }

  const uint8_t* lower_row(int64_t position) const {
    return split_.lower + position * (codes_.stride / 2);
  }

  // The scores of a list's candidates become those of whole codes.
  void add_lower_halves(int q) {
    constexpr std::ptrdiff_t kAhead = 4 * kRowsAtOnce;
    Candidate* const first = scratch_.lists[q].begin();
    Candidate* const end = scratch_.lists[q].end();
    for (Candidate* c = first; c < end; c += kRowsAtOnce) {
      for (Candidate* next = c + kAhead; next < std::min(c + kAhead + kRowsAtOnce, end); ++next)
        prefetch_elements(lower_row(next->position), codes_.stride / 2);
      const uint8_t* rows[kRowsAtOnce];
      int32_t products[kRowsAtOnce];
      const auto count = std::min<std::ptrdiff_t>(kRowsAtOnce, end - c);
      for (int i = 0; i < kRowsAtOnce; ++i) {
        const int32_t position = c[std::min<std::ptrdiff_t>(i, count - 1)].position;
        verify_row(split_.lower_guard, position / kBlockKeys);
        rows[i] = lower_row(position);
      }
      dot_lower_rows<Chunks>(rows, query_code(q), products);
      for (int i = 0; i < count; ++i) c[i].score = 16 * c[i].score + products[i];
    }
    outcome_.code_bytes += (end - first) * (codes_.stride / 2);
  }

  void interleave() {
    quads_.resize(scratch_.query_codes.size());
    for (int q = 0; q + kQuad <= request_.num_queries; q += kQuad) {
      const int8_t* queries[kQuad];
      for (int i = 0; i < kQuad; ++i) queries[i] = query_code(q + i);
      interleave_quad(queries, codes_.stride, quads_.data() + int64_t{q} * codes_.stride);
    }
  }

  // The scores of neighbouring blocks become those of whole codes.
  template <int Queries, int NumBlocks>
  void add_lower_halves(int first_query, int64_t first_block, int32_t* scores) {
    for (int b = 0; b < NumBlocks; ++b) {
      verify_row(split_.lower_guard, first_block + b);
      const uint8_t* const first_row = lower_row((first_block + b) * kBlockKeys);
      int32_t products[Queries][kRowsAtOnce];
      if constexpr (Queries == kQuad) {
        dot_lower_rows_quad<Chunks>(first_row, quads_.data() + int64_t{first_query} * codes_.stride,
                                    products);
      } else {
        const uint8_t* rows[kRowsAtOnce];
        for (int r = 0; r < kRowsAtOnce; ++r) rows[r] = first_row + r * (codes_.stride / 2);
        for (int i = 0; i < Queries; ++i)
          dot_lower_rows<Chunks>(rows, query_code(first_query + i), products[i]);
      }
      for (int i = 0; i < Queries; ++i) {
        int32_t* const out = scores + (i * NumBlocks + b) * kBlockKeys;
        for (int lane = 0; lane < kBlockKeys; ++lane)
          out[lane] = 16 * out[lane] + products[i][lane];
      }
      if (first_query == 0) outcome_.code_bytes += kBlockKeys * (codes_.stride / 2);
    }
  }

  const int8_t* query_code(int q) const {
    return scratch_.query_codes.data() + static_cast<int64_t>(q) * codes_.stride;
  }

  const SplitCodes& split_;
  AlignedVector<int8_t> quads_;  // codes of each four queries, interleaved
};

}  // namespace
}  // namespace relay::index

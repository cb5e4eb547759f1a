// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "code_blocks.h"

namespace relay::index {
namespace {

// Which lists of keys the queries of a group read: those whose representatives they like best.
class ListChoice {
 public:
  void reset(int32_t num_lists, int num_queries) {
    stride_ = (num_lists + kBlockKeys - 1) / kBlockKeys * kBlockKeys;
    num_queries_ = num_queries;
    scores_.assign(static_cast<size_t>(num_queries) * stride_, 0);
    chosen_.assign(num_lists, 0);
  }

  // Adds to the scores of lists [begin, end), and perhaps of their neighbours, the products of
  // their representatives with `queries`.
  void add_products(const CodeBlocks& representatives, int32_t begin, int32_t end,
                    const int8_t* queries) {
    const int32_t first = begin / kBlockKeys;
    for_each_query_product(representatives, first, (end + kBlockKeys - 1) / kBlockKeys - first,
                           queries, representatives.stride, num_queries_,
                           [&](int q, int64_t block, auto count, const int32_t* products) {
                             int32_t* to = scores_.data() + static_cast<size_t>(q) * stride_ +
                                           block * kBlockKeys;
                             for (int i = 0; i < kBlockKeys * count(); ++i) to[i] += products[i];
                           });
  }

  int32_t score(int query, int32_t list) const {
    return scores_[static_cast<size_t>(query) * stride_ + list];
  }
  bool is_chosen(int32_t list) const { return chosen_[list]; }

  // Chooses the `width` of `lists` that a query likes best, and more until they hold `least_keys`;
  // reorders them. `sizes` are keys of each list.
  void choose(int query, std::span<int32_t> lists, std::span<const int32_t> sizes, int64_t width,
              int64_t least_keys) {
    const int32_t* scores = scores_.data() + static_cast<size_t>(query) * stride_;
    const auto better_list = [&](int32_t a, int32_t b) {
      return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
    };
    const auto rest = lists.begin() + std::min<int64_t>(width, lists.size());
    std::nth_element(lists.begin(), rest, lists.end(), better_list);
    int64_t held = 0;
    const auto take = [&](int32_t list) {
      chosen_[list] = 1;
      held += sizes[list];
    };
    std::for_each(lists.begin(), rest, take);
    if (held >= least_keys) return;
    std::sort(rest, lists.end(), better_list);
    for (auto next = rest; next < lists.end() && held < least_keys; ++next) take(*next);
  }

 private:
  int32_t stride_ = 0;
  int num_queries_ = 0;
  std::vector<int32_t> scores_;  // [queries, stride]
  std::vector<char> chosen_;
};

}  // namespace
}  // namespace relay::index

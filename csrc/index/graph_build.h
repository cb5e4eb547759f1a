// SPDX-License-Identifier: Apache-2.0
// RoarGraph (Chen et al., 2024, section 4): a graph of keys made from what training queries find
// near each other (neighbourhood-aware projection), then from what keys find when they search it
// (connectivity enhancement), then repaired until every key can be reached. Every phase reads a
// fixed state and writes one row per thread: the result does not depend on the number of threads.
#pragma once

#include <omp.h>

#include "aligned_vector.h"
#include "graph_search.h"
#include "kernels.h"
#include "nearest_keys.h"

namespace relay::index {
namespace {

template <int Chunks>
class GraphBuilder {
 public:
  GraphBuilder(const Codes& codes, const Rows& keys, const Graph& graph,
               const GraphBuildOptions& options)
      : codes_(codes), graph_(graph), options_(options), n_(codes.num_rows) {
    queries_.resize(static_cast<size_t>(n_) * codes.size);
    query_codes_.resize(static_cast<size_t>(n_) * codes.stride);
    forms_.resize(n_);
    penalty_.resize(n_);
    with_elements(keys, [&](const auto* rows) {
#pragma omp parallel for num_threads(options_.num_threads) schedule(static)
      for (int64_t i = 0; i < n_; ++i) {
        float* query = queries_.data() + i * codes_.size;
        double norm = 0;
        for (int32_t d = 0; d < codes_.size; ++d) {
          query[d] = to_float(rows[i * codes_.size + d]);
          if (options_.norm_weight > 0) query[d] -= codes_.mean[d];
          norm += double{query[d]} * query[d];
        }
        forms_[i] = encode_query(query, codes_, query_codes_.data() + i * codes_.stride);
        penalty_[i] = 0.5 * options_.norm_weight * norm;
      }
    });
  }

  // `nearest` [num_queries, k]: keys of each training query, best first, -1 where there are fewer.
  // A key is a pivot of every query that ranks it `pivot_rank` or better; its candidates are what
  // those queries found.
  void project(const int32_t* nearest, int64_t num_queries, int32_t k) {
    std::vector<std::vector<int32_t>> queries_of(n_);
    for (int64_t q = 0; q < num_queries; ++q)
      for (int32_t i = 0; i < std::min(k, options_.pivot_rank) && nearest[q * k + i] >= 0; ++i)
        queries_of[nearest[q * k + i]].push_back(static_cast<int32_t>(q));
    std::vector<std::vector<int32_t>> chosen(n_);
#pragma omp parallel num_threads(options_.num_threads)
    {
      std::vector<int32_t> ids;
      std::vector<Found> candidates;
#pragma omp for schedule(dynamic, 64)
      for (int64_t x = 0; x < n_; ++x) {
        const auto& from = queries_of[x];
        if (from.empty()) continue;
        ids.clear();
        const size_t used = std::min<size_t>(options_.queries_per_pivot, from.size());
        for (size_t i = 0; i < used; ++i) {
          const int32_t* list = nearest + from[i * from.size() / used] * static_cast<int64_t>(k);
          for (int32_t j = 0; j < k && list[j] >= 0; ++j)
            if (list[j] != x) ids.push_back(list[j]);
        }
        std::sort(ids.begin(), ids.end());
        ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
        score(static_cast<int32_t>(x), ids, candidates);
        chosen[x] = prune(static_cast<int32_t>(x), candidates, options_.projection_degree, true);
      }
    }
    std::vector<std::vector<int32_t>> lists = chosen;
    add_reverse(chosen, lists, options_.projection_degree);
#pragma omp parallel for num_threads(options_.num_threads) schedule(static)
    for (int64_t x = 0; x < n_; ++x) {
      int32_t* row = row_of(x);
      row[0] = static_cast<int32_t>(lists[x].size());
      std::copy(lists[x].begin(), lists[x].end(), row + 1);
    }
    projected_.resize(n_);
    for (int64_t x = 0; x < n_; ++x) projected_[x] = static_cast<int32_t>(lists[x].size());
  }

  // Every key searches the graph and is linked to what it finds.
  void connect(const int32_t* entries, int32_t num_entries) {
    std::vector<SearchScratch> scratch(options_.num_threads);
    constexpr int64_t kSmallest = 1024;
    const int64_t largest = std::max<int64_t>(kSmallest, n_ / 16);
    std::vector<int32_t> order(n_);
    const SpreadOrder spread(n_);
    for (int64_t i = 0; i < n_; ++i) order[i] = static_cast<int32_t>(spread[i]);
    std::vector<std::vector<int32_t>> chosen;
    for (int64_t begin = 0; begin < n_;) {
      const int64_t end = std::min(n_, begin + std::min(largest, std::max(kSmallest, begin)));
      chosen.assign(end - begin, {});
#pragma omp parallel num_threads(options_.num_threads)
      {
        SearchScratch& mine = scratch[omp_get_thread_num()];
        GraphSearch<Chunks> search(codes_, graph_, mine);
        std::vector<Found> candidates;
        std::vector<int32_t> ids;
#pragma omp for schedule(dynamic, 16)
        for (int64_t i = begin; i < end; ++i) {
          const int32_t x = order[i];
          search.run(query_for(x, entries, num_entries));
          ids.clear();
          for (const auto& entry : search.queue(0).entries())
            if (entry.score > search.queue(0).bound() && entry.id != x) ids.push_back(entry.id);
          std::sort(ids.begin(), ids.end());
          score(x, ids, candidates);
          chosen[i - begin] = prune(x, candidates, options_.supply_degree, false);
        }
      }
      link(order.data() + begin, chosen);
      begin = end;
    }
  }

  // Gives every key that cannot be reached from the entries an edge from one that can. Returns how
  // many there were.
  void repair(const int32_t* entries, int32_t num_entries) {
    std::vector<char> reached(n_, 0);
    std::vector<int32_t> stack;
    const auto spread = [&](int32_t from) {
      reached[from] = 1;
      stack.push_back(from);
      while (!stack.empty()) {
        const int32_t* row = row_of(stack.back());
        stack.pop_back();
        for (int32_t i = 1; i <= row[0]; ++i)
          if (!reached[row[i]]) {
            reached[row[i]] = 1;
            stack.push_back(row[i]);
          }
      }
    };
    for (int32_t i = 0; i < num_entries; ++i)
      if (!reached[entries[i]]) spread(entries[i]);
    SearchScratch scratch;
    GraphSearch<Chunks> search(codes_, graph_, scratch);
    std::vector<Found> candidates;
    std::vector<int32_t> ids;
    for (int64_t x = 0; x < n_; ++x) {
      if (reached[x]) continue;
      search.run(query_for(static_cast<int32_t>(x), entries, num_entries));
      ids.clear();
      for (const auto& entry : search.queue(0).entries())
        if (reached[entry.id]) ids.push_back(entry.id);
      score(static_cast<int32_t>(x), ids, candidates);
      std::sort(candidates.begin(), candidates.end(), better);
      bool linked = false;
      for (const Found& candidate : candidates)
        if ((linked = append_edge(candidate.id, static_cast<int32_t>(x)))) break;
      for (int64_t near = 1; near < n_ && !linked; ++near)
        for (const int64_t y : {x - near, x + near})
          if (!linked && y >= 0 && y < n_ && reached[y])
            linked = append_edge(static_cast<int32_t>(y), static_cast<int32_t>(x));
      spread(static_cast<int32_t>(x));
    }
  }

 private:
  int32_t* row_of(int64_t x) const { return graph_.rows + x * graph_.stride; }
  const uint8_t* code_of(int64_t x) const { return codes_.data + x * codes_.stride; }

  GraphQuery query_for(int32_t x, const int32_t* entries, int32_t num_entries) const {
    return {.queries = queries_.data() + static_cast<int64_t>(x) * codes_.size,
            .query_stride = codes_.size,
            .num_queries = 1,
            .width = options_.build_width,
            .keep = 0,
            .range = -1.f,
            .window_max = nullptr,
            .begin = 0,
            .prefix_len = static_cast<int32_t>(n_),
            .entries = entries,
            .num_entries = num_entries};
  }

  // How close the keys `ids` are to key x; larger is closer.
  void score(int32_t x, const std::vector<int32_t>& ids, std::vector<Found>& out) const {
    out.clear();
    int32_t products[kRowsAtOnce];
    const uint8_t* rows[kRowsAtOnce];
    for (size_t at = 0; at < ids.size(); at += kRowsAtOnce) {
      const size_t count = std::min<size_t>(kRowsAtOnce, ids.size() - at);
      for (size_t r = 0; r < kRowsAtOnce; ++r) rows[r] = code_of(ids[at + std::min(r, count - 1)]);
      dot_rows<Chunks>(rows, query_codes_.data() + static_cast<int64_t>(x) * codes_.stride,
                       products);
      for (size_t r = 0; r < count; ++r)
        out.push_back({ids[at + r], closeness(x, ids[at + r], products[r])});
    }
  }

  float closeness(int32_t from, int32_t to, int32_t product) const {
    return static_cast<float>(forms_[from].offset + forms_[from].unit * product - penalty_[to]);
  }

  // The candidates closest to x, each dropped that is closer to one already taken than to x;
  // `fill` tops the list up with the closest of those dropped.
  std::vector<int32_t> prune(int32_t x, std::vector<Found>& candidates, size_t degree,
                             bool fill) const {
    std::sort(candidates.begin(), candidates.end(), better);
    std::vector<int32_t> near{x}, dropped;  // x itself, then those taken
    int32_t products[kRowsAtOnce];
    const uint8_t* rows[kRowsAtOnce];
    for (const Found& candidate : candidates) {
      if (near.size() > degree) break;
      const int32_t p = candidate.id;
      float to_x = 0.f;
      bool occluded = false;
      for (size_t at = 0; at < near.size() && !occluded; at += kRowsAtOnce) {
        const size_t count = std::min<size_t>(kRowsAtOnce, near.size() - at);
        for (size_t r = 0; r < kRowsAtOnce; ++r)
          rows[r] = code_of(near[at + std::min(r, count - 1)]);
        dot_rows<Chunks>(rows, query_codes_.data() + static_cast<int64_t>(p) * codes_.stride,
                         products);
        if (at == 0) to_x = closeness(p, x, products[0]);
        for (size_t r = at == 0; r < count && !occluded; ++r)
          occluded = closeness(p, near[at + r], products[r]) > to_x;
      }
      (occluded ? dropped : near).push_back(p);
    }
    near.erase(near.begin());
    if (fill)
      for (size_t i = 0; i < dropped.size() && near.size() < degree; ++i)
        near.push_back(dropped[i]);
    return near;
  }

  void add_reverse(const std::vector<std::vector<int32_t>>& chosen,
                   std::vector<std::vector<int32_t>>& lists, size_t degree) {
    std::vector<std::vector<int32_t>> incoming(n_);
    for (int64_t x = 0; x < n_; ++x)
      for (const int32_t y : chosen[x]) incoming[y].push_back(static_cast<int32_t>(x));
#pragma omp parallel num_threads(options_.num_threads)
    {
      std::vector<Found> candidates;
#pragma omp for schedule(dynamic, 64)
      for (int64_t y = 0; y < n_; ++y) {
        if (incoming[y].empty()) continue;
        std::vector<int32_t> all = lists[y];
        all.insert(all.end(), incoming[y].begin(), incoming[y].end());
        std::sort(all.begin(), all.end());
        all.erase(std::unique(all.begin(), all.end()), all.end());
        if (all.size() > degree) {
          score(static_cast<int32_t>(y), all, candidates);
          all = prune(static_cast<int32_t>(y), candidates, degree, true);
        }
        lists[y] = std::move(all);
      }
    }
  }

  // Adds edges from nodes[i] to chosen[i] and back; a row that is full keeps its projected edges
  // and the closest of the others.
  void link(const int32_t* nodes, const std::vector<std::vector<int32_t>>& chosen) {
    std::vector<std::pair<int32_t, int32_t>> edges;
    for (size_t i = 0; i < chosen.size(); ++i)
      for (const int32_t y : chosen[i]) {
        edges.emplace_back(nodes[i], y);
        edges.emplace_back(y, nodes[i]);
      }
    std::sort(edges.begin(), edges.end());
    std::vector<size_t> starts;
    for (size_t i = 0; i < edges.size(); ++i)
      if (i == 0 || edges[i].first != edges[i - 1].first) starts.push_back(i);
    starts.push_back(edges.size());
#pragma omp parallel num_threads(options_.num_threads)
    {
      std::vector<Found> candidates;
      std::vector<int32_t> ids;
#pragma omp for schedule(dynamic, 64)
      for (size_t s = 0; s < starts.size() - 1; ++s) {
        const int32_t x = edges[starts[s]].first;
        int32_t* row = row_of(x);
        const int32_t kept = projected_[x];
        const auto capacity =
            std::min<int32_t>(graph_.stride - 1 - kSpareEdges, kept + 2 * options_.supply_degree);
        ids.assign(row + 1 + kept, row + 1 + row[0]);
        for (size_t e = starts[s]; e < starts[s + 1]; ++e) {
          const int32_t y = edges[e].second;
          if (std::find(row + 1, row + 1 + kept, y) == row + 1 + kept &&
              std::find(ids.begin(), ids.end(), y) == ids.end())
            ids.push_back(y);
        }
        if (static_cast<int32_t>(ids.size()) > capacity - kept) {
          score(x, ids, candidates);
          ids = prune(x, candidates, std::max(0, capacity - kept), false);
        }
        std::copy(ids.begin(), ids.end(), row + 1 + kept);
        row[0] = kept + static_cast<int32_t>(ids.size());
      }
    }
  }

  bool append_edge(int32_t from, int32_t to) {
    int32_t* row = row_of(from);
    if (row[0] >= graph_.stride - 1) return false;
    row[++row[0]] = to;
    return true;
  }

  static constexpr int32_t kSpareEdges = 1;  // kept free for repairs

  const Codes& codes_;
  const Graph graph_;
  const GraphBuildOptions options_;
  const int64_t n_;
  AlignedVector<float> queries_;
  AlignedVector<int8_t> query_codes_;
  std::vector<QueryCode> forms_;
  std::vector<double> penalty_;
  std::vector<int32_t> projected_;
};

}  // namespace
}  // namespace relay::index

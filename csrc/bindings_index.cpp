// SPDX-License-Identifier: Apache-2.0
#include "bindings_index.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings.h"
#include "index/block_layout.h"
#include "index/block_ranges.h"
#include "index/spread_order.h"

namespace nb = nanobind;
using namespace relay::index;

namespace {

// How many keys at least one query found.
int64_t count_distinct(const std::vector<std::vector<Found>>& found, int64_t num_keys) {
  static thread_local std::vector<char> is_seen;
  if (static_cast<int64_t>(is_seen.size()) < num_keys) is_seen.resize(num_keys);
  int64_t count = 0;
  for (const auto& each : found)
    for (const Found& f : each) {
      count += !is_seen[f.id];
      is_seen[f.id] = 1;
    }
  for (const auto& each : found)
    for (const Found& f : each) is_seen[f.id] = 0;
  return count;
}

}  // namespace

void HeadPart::search(const float* queries, size_t num_queries, const float* window_max,
                      int64_t begin, int64_t prefix_len, float scale,
                      SearchOutcome& outcome) const {
  if (everything) {
    outcome.found.assign(num_queries, {});
    const Rows keys = searcher->set.view_rows();
    for (size_t q = 0; q < num_queries; ++q)
      searcher->kernels.score_range(queries + q * keys.size, keys, begin, prefix_len,
                                    outcome.found[q]);
    outcome.rescored = std::max<int64_t>(0, prefix_len - begin);
    return;
  }
  searcher->search(
      searcher->request_of(queries, num_queries, k, range, width, window_max, begin, prefix_len,
                           entries, scale, max_dropped_mass, value_means.has_value()),
      outcome);
}

void HeadPart::attend(const SearchOutcome& outcome, float scale, float* out, float* lse) const {
  const Unread* unread = outcome.unread.empty() ? nullptr : outcome.unread.data();
  searcher->kernels.attend_found(outcome.found, view_values(), unread,
                                 unread ? rows_of(*value_means, type) : Rows{}, scale, out, lse);
}

HeadCounts relay::index::counts_of(const HeadPart& part, const SearchOutcome& outcome) {
  int64_t value_rows = 0;
  for (const auto& each : outcome.found) value_rows += static_cast<int64_t>(each.size());
  for (const Unread& each : outcome.unread)
    value_rows += std::ranges::count_if(each.weights, [](float weight) { return weight > 0; });
  const int64_t distinct =
      part.everything ? outcome.rescored : count_distinct(outcome.found, part.values.shape(0));
  return {outcome.distances, outcome.hops, outcome.rescored,
          value_rows,        distinct,     outcome.code_bytes};
}

namespace {

template <class T, class At>
nb::object to_numpy(size_t size, const At& at) {
  T* copy = new T[size];
  for (size_t i = 0; i < size; ++i) copy[i] = at(i);
  nb::capsule owner(copy, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  const size_t shape[1] = {size};
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(copy, 1, shape, owner));
}

template <class T>
nb::object to_numpy(const std::vector<T>& values) {
  return to_numpy<T>(values.size(), [&](size_t i) { return values[i]; });
}

nb::tuple to_python(const SearchOutcome& outcome) {
  nb::list ids, scores;
  for (const auto& found : outcome.found) {
    ids.append(to_numpy<int32_t>(found.size(), [&](size_t i) { return found[i].id; }));
    scores.append(to_numpy<float>(found.size(), [&](size_t i) { return found[i].score; }));
  }
  const bool certified = !outcome.dropped_mass.empty();
  return nb::make_tuple(ids, scores, certified ? to_numpy(outcome.dropped_mass) : nb::none(),
                        outcome.distances, outcome.hops, outcome.rescored, outcome.code_bytes);
}

std::pair<float, float> encode(const std::string& kernel, const AnyRows& keys, int type,
                               const Array<const float, 1>& mean,
                               const Array<const float, 1>& scale, int64_t begin, int64_t end,
                               Array<uint8_t, 2> codes, Array<uint8_t, 1> outside,
                               int num_threads) {
  const IndexKernels& kernels = index_kernels(kernel);
  nb::gil_scoped_release release;
  return kernels.encode(rows_of(keys, type), mean.data(), scale.data(), begin, end, codes.data(),
                        codes.shape(1), outside.data(), num_threads);
}

void nearest(const std::string& kernel, const KeySet& set, const Array<const float, 2>& queries,
             const Array<const int32_t, 1>& always, Array<int32_t, 2> ids, int num_threads) {
  const IndexKernels& kernels = index_kernels(kernel);
  nb::gil_scoped_release release;
  kernels.nearest(set.view_codes(), set.view_rows(), queries.data(), queries.shape(0),
                  static_cast<int32_t>(ids.shape(1)), {always.data(), always.shape(0)}, ids.data(),
                  num_threads);
}

// The order in which `nearest` meets the keys: of equal codes the first ones win.
nb::object spread_order(int64_t n) {
  const SpreadOrder order(n);
  std::vector<int32_t> ids(n);
  for (int64_t i = 0; i < n; ++i) ids[i] = static_cast<int32_t>(order[i]);
  return to_numpy(ids);
}

// Query codes [queries, row bytes], signed.
void encode_queries(const std::string& kernel, const KeySet& set,
                    const Array<const float, 2>& queries, Array<int8_t, 2> codes) {
  const IndexKernels& kernels = index_kernels(kernel);
  nb::gil_scoped_release release;
  for (size_t q = 0; q < queries.shape(0); ++q)
    kernels.encode_query(set.view_codes(), queries.data() + q * queries.shape(1),
                         codes.data() + q * codes.shape(1));
}

void refine(const std::string& kernel, const KeySet& set, const Array<const float, 2>& queries,
            const Array<const int32_t, 2>& candidates, const Array<const int32_t, 1>& always,
            Array<int32_t, 2> ids, int num_threads) {
  const IndexKernels& kernels = index_kernels(kernel);
  nb::gil_scoped_release release;
  kernels.refine(set.view_rows(), queries.data(), queries.shape(0), candidates.data(),
                 candidates.shape(1), {always.data(), always.shape(0)},
                 static_cast<int32_t>(ids.shape(1)), ids.data(), num_threads);
}

void build_graph(const std::string& kernel, const KeySet& set, Array<int32_t, 2> graph,
                 const Array<const int32_t, 2>& nearest, const Array<const int32_t, 1>& entries,
                 int projection_degree, int supply_degree, int build_width, int pivot_rank,
                 int queries_per_pivot, float norm_weight, int num_threads) {
  const IndexKernels& kernels = index_kernels(kernel);
  nb::gil_scoped_release release;
  kernels.build_graph(set.view_codes(), set.view_rows(),
                      {graph.data(), static_cast<int32_t>(graph.shape(1))},
                      {projection_degree, supply_degree, build_width, pivot_rank, queries_per_pivot,
                       norm_weight, num_threads},
                      nearest.data(), nearest.shape(0), static_cast<int32_t>(nearest.shape(1)),
                      entries.data(), static_cast<int32_t>(entries.shape(0)));
}

class GraphSearcher : public Searcher {
 public:
  GraphSearcher(const std::string& kernel, KeySet set, Array<const int32_t, 1> always,
                Array<const int32_t, 2> graph, nb::object graph_guard)
      : Searcher(kernel, std::move(set), std::move(always)),
        graph_(std::move(graph)),
        graph_guard_(guard_of(graph_, std::move(graph_guard))) {}
  void search(const SearchRequest& request, SearchOutcome& outcome) const override {
    kernels.search_graph(set.view_codes(), set.view_rows(),
                         {const_cast<int32_t*>(graph_.data()),
                          static_cast<int32_t>(graph_.shape(1)), graph_guard_.guard},
                         request, outcome);
  }
  int64_t hop_bytes() const override { return 4 * static_cast<int64_t>(graph_.shape(1)); }

 private:
  Array<const int32_t, 2> graph_;
  GuardArgument graph_guard_;
};

// Codes of a set whose rows lie in blocks.
Codes block_codes(const KeySet& set) {
  Codes codes = set.view_codes();
  codes.stride /= kBlockKeys;
  return codes;
}

// Codes of a set are the upper halves; `lower` are the others, as long.
class FlatSearcher : public Searcher {
 public:
  FlatSearcher(const std::string& kernel, KeySet set, Array<const int32_t, 1> always,
               Array<const uint8_t, 2> lower, nb::object lower_guard)
      : Searcher(kernel, std::move(set), std::move(always)),
        lower_(std::move(lower)),
        lower_guard_(guard_of(lower_, std::move(lower_guard))) {}
  void search(const SearchRequest& request, SearchOutcome& outcome) const override {
    std::vector<BlockRange> ranges;
    append_ranges(request.begin, request.prefix_len, {always.data(), always.shape(0)}, ranges);
    Codes codes = block_codes(set);
    codes.stride *= 2;
    kernels.scan(codes, {set.codes.data(), lower_.data(), lower_guard_.guard}, set.view_rows(),
                 ranges, request, outcome);
  }

 private:
  Array<const uint8_t, 2> lower_;
  GuardArgument lower_guard_;
};

class ListSearcher : public Searcher {
 public:
  ListSearcher(const std::string& kernel, KeySet set, Array<const int32_t, 1> always,
               Array<const uint8_t, 2> centres, Array<const int64_t, 1> starts,
               Array<const int32_t, 1> counts, Array<const int32_t, 1> ids)
      : Searcher(kernel, std::move(set), std::move(always)),
        centres_(std::move(centres)),
        starts_(std::move(starts)),
        counts_(std::move(counts)),
        ids_(std::move(ids)) {}
  void search(const SearchRequest& request, SearchOutcome& outcome) const override {
    kernels.search_lists(block_codes(set),
                         {centres_.data(), static_cast<int32_t>(counts_.shape(0)), set.codes.data(),
                          starts_.data(), counts_.data(), ids_.data()},
                         set.view_rows(), request, outcome);
  }

 private:
  Array<const uint8_t, 2> centres_;
  Array<const int64_t, 1> starts_;
  Array<const int32_t, 1> counts_, ids_;
};

class BlockSearcher : public Searcher {
 public:
  // representatives [1, ...]: means; [2, ...]: largest and smallest codes.
  BlockSearcher(const std::string& kernel, KeySet set, Array<const int32_t, 1> always,
                Array<const uint8_t, 3> representatives, int block_tokens)
      : Searcher(kernel, std::move(set), std::move(always)),
        representatives_(std::move(representatives)),
        block_tokens_(block_tokens) {}
  void search(const SearchRequest& request, SearchOutcome& outcome) const override {
    const uint8_t* first = representatives_.data();
    const size_t size = representatives_.shape(1) * representatives_.shape(2);
    kernels.search_blocks(block_codes(set),
                          {set.codes.data(), first,
                           representatives_.shape(0) == 2 ? first + size : nullptr, block_tokens_},
                          set.view_rows(), request, outcome);
  }

 private:
  Array<const uint8_t, 3> representatives_;
  int block_tokens_;
};

void check_finite(const float* values, size_t count) {
  bool finite = true;
  for (size_t i = 0; i < count; ++i) finite &= std::isfinite(values[i]);
  if (!finite)
    throw std::invalid_argument("queries: NaN or infinity, expected finite numbers only");
}

nb::tuple search(const Searcher& searcher, const Array<const float, 2>& queries, int k, float range,
                 int width, const std::optional<Array<const float, 1>>& window_max, int64_t begin,
                 int64_t prefix_len, const Array<const int32_t, 1>& entries, float scale,
                 float max_dropped_mass) {
  check_finite(queries.data(), queries.size());
  SearchOutcome outcome;
  {
    nb::gil_scoped_release release;
    searcher.search(searcher.request_of(queries.data(), queries.shape(0), k, range, width,
                                        window_max ? window_max->data() : nullptr, begin,
                                        prefix_len, entries, scale, max_dropped_mass),
                    outcome);
  }
  return to_python(outcome);
}

// Searches one index per kv head, `num_threads` at a time, and attends what each query found.
// queries [kv_heads, group, size], window_max [kv_heads, group], output [kv_heads, group, value
// size], lse and dropped_mass [kv_heads, group], counts [kv_heads, 6]: HeadCounts.
void attend_heads(const std::vector<HeadPart>& heads, const Array<const float, 3>& queries,
                  const std::optional<Array<const float, 2>>& window_max, int64_t begin,
                  int64_t prefix_len, float scale, Array<float, 3> output, Array<float, 2> lse,
                  Array<float, 2> dropped_mass, Array<int64_t, 2> counts, int num_threads) {
  check_finite(queries.data(), queries.size());
  nb::gil_scoped_release release;
  const size_t group = queries.shape(1), size = queries.shape(2), value_size = output.shape(2);
  const auto attend = [&](size_t h) {
    const HeadPart& head = heads[h];
    SearchOutcome outcome;
    head.search(queries.data() + h * group * size, group,
                window_max ? window_max->data() + h * group : nullptr, begin, prefix_len, scale,
                outcome);
    head.attend(outcome, scale, output.data() + h * group * value_size, lse.data() + h * group);
    for (size_t q = 0; q < group; ++q)
      dropped_mass.data()[h * group + q] = head.everything                ? 0
                                           : outcome.dropped_mass.empty() ? NAN
                                                                          : outcome.dropped_mass[q];
    const HeadCounts counted = counts_of(head, outcome);
    std::copy_n(&counted.distances, 6, counts.data() + 6 * h);
  };
  std::vector<std::exception_ptr> errors(heads.size());  // they cannot leave a parallel region
#pragma omp parallel for schedule(dynamic, 1) num_threads(num_threads)
  for (size_t h = 0; h < heads.size(); ++h) {
    try {
      attend(h);
    } catch (...) {
      errors[h] = std::current_exception();
    }
  }
  for (const std::exception_ptr& error : errors)
    if (error) std::rethrow_exception(error);
}

// ids: those of all queries one after the other; starts [num_queries + 1].
void attend_ids(const std::string& kernel, const Array<const float, 2>& queries,
                const AnyRows& keys, int key_type, const AnyRows& values, int value_type,
                const Array<const int32_t, 1>& ids, const Array<const int64_t, 1>& starts,
                float scale, Array<float, 2> output, Array<float, 1> lse) {
  check_finite(queries.data(), queries.size());
  const IndexKernels& kernels = index_kernels(kernel);
  nb::gil_scoped_release release;
  for (size_t q = 0; q < queries.shape(0); ++q) {
    const int64_t begin = starts.data()[q], end = starts.data()[q + 1];
    lse.data()[q] = kernels.attend_ids(queries.data() + q * queries.shape(1),
                                       rows_of(keys, key_type), rows_of(values, value_type),
                                       {ids.data() + begin, static_cast<size_t>(end - begin)},
                                       scale, output.data() + q * output.shape(1));
  }
}

void mean_rows(const std::string& kernel, const AnyRows& rows, int type,
               nb::ndarray<nb::ndim<2>, nb::c_contig, nb::device::cpu> means, int num_threads) {
  const IndexKernels& kernels = index_kernels(kernel);
  nb::gil_scoped_release release;
  kernels.mean_rows(rows_of(rows, type), means.data(), num_threads);
}

// Codes in rows to codes in blocks of sixteen; `order` says which row comes where, -1: none.
void lay_out(const Array<const uint8_t, 2>& codes, const Array<const int32_t, 1>& order,
             Array<uint8_t, 2> blocks) {
  nb::gil_scoped_release release;
  const size_t stride = codes.shape(1);
  for (size_t i = 0; i < order.shape(0); ++i) {
    if (order.data()[i] < 0) continue;
    write_lane(codes.data() + order.data()[i] * stride, static_cast<int32_t>(stride),
               blocks.data() + i / kBlockKeys * kBlockKeys * stride, i % kBlockKeys);
  }
}

// The same of all rows in their order, in halves: blocks of the upper four bits of each element
// and, likewise sixteen at a time, rows of the lower ones. What is behind the last row stays as it
// is.
void split(const Array<const uint8_t, 2>& codes, Array<uint8_t, 2> upper, Array<uint8_t, 2> lower) {
  nb::gil_scoped_release release;
  const auto stride = static_cast<int32_t>(codes.shape(1));
  for (size_t i = 0; i < codes.shape(0); ++i) {
    const uint8_t* const code = codes.data() + i * stride;
    write_upper_lane(code, stride, upper.data() + i / kBlockKeys * kBlockKeys * stride / 2,
                     i % kBlockKeys);
    write_lower_row(code, stride, lower.data() + i * stride / 2);
  }
}

}  // namespace

void bind_index(nb::module_& module) {
  nb::module_ index = module.def_submodule("index");
  index.def("kernels", [] {
    std::vector<std::string> names;
    for (const auto name : index_kernel_names()) names.emplace_back(name);
    return names;
  });
  nb::class_<KeySet>(index, "KeySet")
      .def(
          "__init__",
          [](KeySet* self, AnyRows keys, int type, Array<const uint8_t, 2> codes,
             Array<const float, 1> mean, Array<const float, 1> scale, float longest,
             float longest_error, nb::object key_guard, nb::object code_guard) {
            new (self) KeySet{keys,
                              codes,
                              mean,
                              scale,
                              type,
                              longest,
                              longest_error,
                              guard_of(keys, key_guard),
                              guard_of(codes, code_guard)};
          },
          nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
          nb::arg("key_guard").none() = nb::none(), nb::arg("code_guard").none() = nb::none());
  index.def("encode", &encode);
  index.def("nearest", &nearest);
  index.def("encode_queries", &encode_queries);
  index.def("refine", &refine);
  index.def("spread_order", &spread_order);
  index.def("num_rescored", &num_rescored);
  index.def("build_graph", &build_graph);
  nb::class_<Searcher>(index, "Searcher")
      .def("search", &search, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(),
           nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg());
  nb::class_<GraphSearcher, Searcher>(index, "GraphSearcher")
      .def(nb::init<const std::string&, KeySet, Array<const int32_t, 1>, Array<const int32_t, 2>,
                    nb::object>(),
           nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg("graph_guard").none() = nb::none());
  nb::class_<FlatSearcher, Searcher>(index, "FlatSearcher")
      .def(nb::init<const std::string&, KeySet, Array<const int32_t, 1>, Array<const uint8_t, 2>,
                    nb::object>(),
           nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg("lower_guard").none() = nb::none());
  nb::class_<ListSearcher, Searcher>(index, "ListSearcher")
      .def(nb::init<const std::string&, KeySet, Array<const int32_t, 1>, Array<const uint8_t, 2>,
                    Array<const int64_t, 1>, Array<const int32_t, 1>, Array<const int32_t, 1>>());
  nb::class_<BlockSearcher, Searcher>(index, "BlockSearcher")
      .def(nb::init<const std::string&, KeySet, Array<const int32_t, 1>, Array<const uint8_t, 3>,
                    int>());
  nb::class_<HeadPart>(index, "HeadPart")
      .def(
          "__init__",
          [](HeadPart* self, const Searcher* searcher, AnyRows values, int type,
             nb::object value_guard, std::optional<AnyRows> value_means,
             Array<const int32_t, 1> entries, bool everything, int k, float range, int width,
             float max_dropped_mass) {
            GuardArgument guard = guard_of(values, std::move(value_guard));
            new (self) HeadPart{searcher, values, type,  std::move(guard), entries,    everything,
                                k,        range,  width, max_dropped_mass, value_means};
          },
          nb::arg("searcher"), nb::arg("values"), nb::arg("type"), nb::arg("value_guard").none(),
          nb::arg("value_means").none(), nb::arg("entries"), nb::arg("everything"), nb::arg("k"),
          nb::arg("range"), nb::arg("width"), nb::arg("max_dropped_mass"), nb::keep_alive<1, 2>());
  index.def("attend_heads", &attend_heads, nb::arg(), nb::arg(), nb::arg().none(), nb::arg(),
            nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg());
  index.def("attend_ids", &attend_ids);
  index.def("lay_out", &lay_out);
  index.def("split", &split);
  index.def("mean_rows", &mean_rows);
  index.attr("MEAN_KEYS") = kMeanKeys;
}

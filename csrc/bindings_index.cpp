// SPDX-License-Identifier: Apache-2.0
// Arrays arrive as numpy holds them; the Python faces have checked their sizes against each other.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "bindings.h"
#include "index/kernels.h"

namespace nb = nanobind;
using namespace relay::index;

namespace {

template <class T, int Dims>
using Array = nb::ndarray<T, nb::ndim<Dims>, nb::c_contig, nb::device::cpu>;
using AnyRows = nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

Rows rows_of(const AnyRows& array, int type) {
  return {array.data(), static_cast<ElementType>(type), static_cast<int32_t>(array.shape(1)),
          static_cast<int64_t>(array.shape(0))};
}

// The keys of one head, as codes and as they were given.
struct KeySet {
  AnyRows keys;
  Array<const uint8_t, 2> codes;
  Array<const float, 1> mean, scale;
  int type;
  float longest, longest_error;

  Codes view_codes() const {
    return {codes.data(),
            static_cast<int32_t>(codes.shape(1)),
            static_cast<int32_t>(keys.shape(1)),
            static_cast<int64_t>(keys.shape(0)),
            mean.data(),
            scale.data(),
            longest,
            longest_error};
  }
  Rows view_rows() const { return rows_of(keys, type); }
};

template <class T>
nb::object to_numpy(const std::vector<T>& values) {
  T* copy = new T[values.size()];
  std::copy(values.begin(), values.end(), copy);
  nb::capsule owner(copy, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  const size_t shape[1] = {values.size()};
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(copy, 1, shape, owner));
}

nb::tuple to_python(const SearchOutcome& outcome) {
  nb::list ids, scores;
  for (const auto& found : outcome.found) {
    std::vector<int32_t> i;
    std::vector<float> s;
    for (const Found& f : found) {
      i.push_back(f.id);
      s.push_back(f.score);
    }
    ids.append(to_numpy(i));
    scores.append(to_numpy(s));
  }
  return nb::make_tuple(ids, scores, outcome.distances, outcome.hops, outcome.rescored);
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
             Array<int32_t, 2> ids, int num_threads) {
  const IndexKernels& kernels = index_kernels(kernel);
  nb::gil_scoped_release release;
  kernels.nearest(set.view_codes(), set.view_rows(), queries.data(), queries.shape(0),
                  static_cast<int32_t>(ids.shape(1)), ids.data(), num_threads);
}

int64_t build_graph(const std::string& kernel, const KeySet& set, Array<int32_t, 2> graph,
                    const Array<const int32_t, 2>& nearest, const Array<const int32_t, 1>& entries,
                    int projection_degree, int supply_degree, int build_width, int pivot_rank,
                    int queries_per_pivot, float norm_weight, int num_threads) {
  const IndexKernels& kernels = index_kernels(kernel);
  nb::gil_scoped_release release;
  return kernels.build_graph(
      set.view_codes(), set.view_rows(), {graph.data(), static_cast<int32_t>(graph.shape(1))},
      {projection_degree, supply_degree, build_width, pivot_rank, queries_per_pivot, norm_weight,
       num_threads},
      nearest.data(), nearest.shape(0), static_cast<int32_t>(nearest.shape(1)), entries.data(),
      static_cast<int32_t>(entries.shape(0)));
}

// What to search for; keeps the arrays it points to.
struct Request {
  Array<const float, 2> queries;
  std::optional<Array<const float, 1>> window_max;
  Array<const int32_t, 1> entries, always;
  int k;
  float range;
  int width;
  int64_t prefix_len;

  SearchRequest view() const {
    return {queries.data(),
            static_cast<int32_t>(queries.shape(0)),
            k,
            range,
            width,
            window_max ? window_max->data() : nullptr,
            prefix_len,
            entries.data(),
            static_cast<int32_t>(entries.shape(0)),
            always.data(),
            static_cast<int32_t>(always.shape(0))};
  }
};

nb::tuple search_graph(const std::string& kernel, const KeySet& set,
                       const Array<const int32_t, 2>& graph, const Request& request) {
  const IndexKernels& kernels = index_kernels(kernel);
  SearchOutcome outcome;
  {
    nb::gil_scoped_release release;
    kernels.search_graph(set.view_codes(), set.view_rows(),
                         {const_cast<int32_t*>(graph.data()), static_cast<int32_t>(graph.shape(1))},
                         request.view(), outcome);
  }
  return to_python(outcome);
}

// `ranges` [ranges, 3]: first block, keys, lanes of the first block to skip.
nb::tuple scan(const std::string& kernel, const KeySet& set, const Array<const uint8_t, 2>& blocks,
               const Array<const int64_t, 2>& ranges, const Request& request) {
  const IndexKernels& kernels = index_kernels(kernel);
  SearchOutcome outcome;
  {
    nb::gil_scoped_release release;
    std::vector<BlockRange> all(ranges.shape(0));
    for (size_t i = 0; i < all.size(); ++i)
      all[i] = {ranges.data()[3 * i], ranges.data()[3 * i + 1],
                static_cast<uint32_t>(ranges.data()[3 * i + 2])};
    Codes codes = set.view_codes();
    codes.stride = static_cast<int32_t>(blocks.shape(1) / 16);
    kernels.scan(codes, blocks.data(), set.view_rows(), all, request.view(), outcome);
  }
  return to_python(outcome);
}

nb::tuple search_lists(const std::string& kernel, const KeySet& set,
                       const Array<const uint8_t, 2>& centres, int num_lists,
                       const Array<const uint8_t, 2>& blocks, const Array<const int64_t, 1>& starts,
                       const Array<const int32_t, 1>& counts, const Array<const int32_t, 1>& ids,
                       const Request& request) {
  const IndexKernels& kernels = index_kernels(kernel);
  SearchOutcome outcome;
  {
    nb::gil_scoped_release release;
    Codes codes = set.view_codes();
    codes.stride = static_cast<int32_t>(blocks.shape(1) / 16);
    kernels.search_lists(
        codes, {centres.data(), num_lists, blocks.data(), starts.data(), counts.data(), ids.data()},
        set.view_rows(), request.view(), outcome);
  }
  return to_python(outcome);
}

// Codes in rows to codes in blocks of sixteen; `order` says which row comes where, -1: none.
void lay_out(const Array<const uint8_t, 2>& codes, const Array<const int32_t, 1>& order,
             Array<uint8_t, 2> blocks) {
  nb::gil_scoped_release release;
  const size_t stride = codes.shape(1);
  for (size_t i = 0; i < order.shape(0); ++i) {
    if (order.data()[i] < 0) continue;
    const uint8_t* from = codes.data() + order.data()[i] * stride;
    uint8_t* to = blocks.data() + i / 16 * 16 * stride + i % 16 * 4;
    for (size_t s = 0; s < stride / 4; ++s) std::memcpy(to + 64 * s, from + 4 * s, 4);
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
      .def("__init__", [](KeySet* self, AnyRows keys, int type, Array<const uint8_t, 2> codes,
                          Array<const float, 1> mean, Array<const float, 1> scale, float longest,
                          float longest_error) {
        new (self) KeySet{keys, codes, mean, scale, type, longest, longest_error};
      });
  index.def("encode", &encode);
  index.def("nearest", &nearest);
  index.def("build_graph", &build_graph);
  nb::class_<Request>(index, "Request")
      .def(
          "__init__",
          [](Request* self, Array<const float, 2> queries, int k, float range, int width,
             std::optional<Array<const float, 1>> window_max, int64_t prefix_len,
             Array<const int32_t, 1> entries, Array<const int32_t, 1> always) {
            new (self) Request{queries, window_max, entries, always, k, range, width, prefix_len};
          },
          nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg(),
          nb::arg());
  index.def("lay_out", &lay_out);
  index.def("scan", &scan);
  index.def("search_lists", &search_lists);
  index.def("search_graph", &search_graph);
}

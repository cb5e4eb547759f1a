// SPDX-License-Identifier: Apache-2.0
// Attention of one token of each request over what is in host memory: ranges of tokens that are
// read whole, indexes over the request's own tokens, and the indexes of a stored context, which
// requests search together; merged into the attention over what the device has.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <tuple>
#include <vector>

#include "attention/scalar.h"
#include "bindings.h"
#include "bindings_index.h"
#include "common/flush_subnormals.h"

namespace nb = nanobind;
using namespace relay::index;

namespace {

using Range = std::pair<int64_t, int64_t>;
using AllHeads =
    nb::ndarray<nb::ro, nb::ndim<3>, nb::c_contig, nb::device::cpu>;  // [kv_heads, tokens, size]

// Keys and values of a request's tokens.
struct HostRows {
  AllHeads keys, values;
  int type;

  Rows keys_of(int64_t head) const { return rows(keys, head); }
  Rows values_of(int64_t head) const { return rows(values, head); }

 private:
  Rows rows(const AllHeads& array, int64_t head) const {
    const size_t head_bytes = array.nbytes() / std::max<size_t>(1, array.shape(0));
    return {static_cast<const char*>(array.data()) + head * head_bytes,
            static_cast<ElementType>(type),
            static_cast<int32_t>(array.shape(2)),
            static_cast<int64_t>(array.shape(1)),
            nullptr,
            /*is_finite=*/false};
  }
};

// What every kv head of a layer is asked of the keys [begin, prefix_len) of its index.
struct LayerSearch {
  LayerSearch(nb::list heads, int64_t begin, int64_t prefix_len)
      : begin(begin), prefix_len(prefix_len), owner_(std::move(heads)) {
    for (nb::handle head : owner_) parts.push_back(nb::cast<const HeadPart*>(head));
  }

  std::vector<const HeadPart*> parts;
  const int64_t begin, prefix_len;

 private:
  const nb::list owner_;
};

using RangesOfRows = std::pair<const HostRows*, std::vector<Range>>;

// One token of one request, which keeps what is pointed to. `others` are ranges of `own` that are
// read elsewhere and only tell the largest inner product.
struct HostRequest {
  int64_t token;  // row of queries and output
  const HostRows* own;
  std::vector<RangesOfRows> attended;
  std::vector<Range> others;
  std::vector<const LayerSearch*> segments;
};

// A link of a context's chain: a search of its tokens, and ranges of them that are read whole.
using ContextLink = std::pair<const LayerSearch*, std::vector<Range>>;

// Requests that read the same tokens of a context, or one that reads none.
struct HostGroup {
  std::vector<HostRequest> requests;
  std::vector<ContextLink> context;
};

struct Tensors {
  ElementType type;
  int64_t num_kv_heads, group, size;
  const void* query;
  int64_t query_token_stride, query_head_stride;
  void* output;
  int64_t output_token_stride, output_head_stride;
  float* lse;  // [tokens, heads]

  int64_t num_heads() const { return num_kv_heads * group; }
};

struct Totals {
  int64_t searches = 0, searched_tokens = 0, retrieved_tokens = 0, distances = 0, bytes = 0;
  float dropped_mass = NAN;

  void add(const Totals& other) {
    searches += other.searches;
    searched_tokens += other.searched_tokens;
    retrieved_tokens += other.retrieved_tokens;
    distances += other.distances;
    bytes += other.bytes;
    dropped_mass = std::fmax(dropped_mass, other.dropped_mass);
  }

  void add(const LayerSearch& layer, const HeadPart& part, const SearchOutcome& outcome) {
    const KeySet& set = part.searcher->set;
    const HeadCounts counts = counts_of(part, outcome);
    ++searches;
    searched_tokens += layer.prefix_len - layer.begin;
    retrieved_tokens += counts.distinct;
    distances += counts.distances;
    const auto row_bytes = [](const AnyRows& rows) {
      return static_cast<int64_t>(rows.nbytes() / std::max<size_t>(1, rows.shape(0)));
    };
    bytes += counts.code_bytes + counts.hops * part.searcher->hop_bytes() +
             counts.rescored * row_bytes(set.keys) + counts.value_rows * row_bytes(part.values);
    for (const float dropped : outcome.dropped_mass)
      dropped_mass = std::fmax(dropped_mass, dropped);
  }
};

template <class Body>
void with_type(ElementType type, Body&& body) {
  switch (type) {
    case ElementType::kFloat32:
      return body(float{});
    case ElementType::kFloat16:
      return body(relay::Float16{});
    case ElementType::kBFloat16:
      return body(relay::BFloat16{});
  }
}

// Attention over a set of tokens, which grows.
struct State {
  float* output;
  float* lse;

  // `other` weighs e^other_lse.
  template <class T>
  void merge(const T* other, float other_lse, int64_t size) const {
    if (*lse == -INFINITY && other_lse == -INFINITY) return;
    const float top = std::max(*lse, other_lse);  // whichever it is where one is NaN: so is the sum
    const float own = std::exp(*lse - top), added = std::exp(other_lse - top), sum = own + added;
    // rows that weigh nothing may hold anything
    if (added != 0)  // NaN is no nothing
      for (int64_t i = 0; i < size; ++i) {
        const float kept = own > 0 ? own * output[i] : 0.f;
        output[i] = (kept + added * relay::to_float(other[i])) / sum;
      }
    *lse = top + std::log(sum);
  }
};

class HostStep {
 public:
  HostStep(const std::vector<const HostGroup*>& groups, const Tensors& tensors, float scale)
      : groups_(groups), tensors_(tensors), scale_(scale), kernels_(index_kernels()) {
    for (const HostGroup* group : groups) {
      first_state_.push_back(num_states_);
      num_states_ += static_cast<int64_t>(group->requests.size()) * tensors.num_heads();
    }
    outputs_.resize(num_states_ * tensors.size);
    lses_.assign(num_states_, -INFINITY);
  }

  Totals run(int num_threads) {
    const auto num_tasks = static_cast<int64_t>(groups_.size()) * tensors_.num_kv_heads;
    std::vector<std::exception_ptr> errors(num_tasks);  // they cannot leave a parallel region
    std::vector<Totals> totals(num_tasks);
#pragma omp parallel for schedule(dynamic, 1) num_threads(num_threads)
    for (int64_t task = 0; task < num_tasks; ++task) {
      const relay::FlushSubnormals flush;
      try {
        attend(task / tensors_.num_kv_heads, task % tensors_.num_kv_heads, totals[task]);
      } catch (...) {
        errors[task] = std::current_exception();
      }
    }
    for (const std::exception_ptr& error : errors)
      if (error) std::rethrow_exception(error);
    // not before all have succeeded: requests whose context is damaged are left as they were
    for (size_t g = 0; g < groups_.size(); ++g)
      for (size_t r = 0; r < groups_[g]->requests.size(); ++r) add_to_output(g, r);
    Totals total;
    for (const Totals& each : totals) total.add(each);
    return total;
  }

 private:
  State state(size_t group, size_t request, int64_t head) {
    const int64_t at =
        first_state_[group] + static_cast<int64_t>(request) * tensors_.num_heads() + head;
    return {outputs_.data() + at * tensors_.size, lses_.data() + at};
  }

  // One kv head of one group of requests.
  void attend(size_t g, int64_t head, Totals& totals) {
    const HostGroup& group = *groups_[g];
    const int64_t size = tensors_.size;
    const auto num_queries = static_cast<size_t>(tensors_.group);
    const size_t num_rows = group.requests.size() * num_queries;
    std::vector<float> queries(num_rows * size), tops(num_rows, -INFINITY);
    std::vector<Found> found;
    const auto state_of = [&](size_t row) {
      return state(g, row / num_queries, head * tensors_.group + row % num_queries);
    };

    for (size_t row = 0; row < num_rows; ++row) {
      const HostRequest& request = group.requests[row / num_queries];
      float* const query = queries.data() + row * size;
      read_query(request.token, head * tensors_.group + row % num_queries, query);
      if (!make_finite(query)) {
        const State state = state_of(row);
        std::fill_n(state.output, size, NAN);
        *state.lse = NAN;
      }
      const auto score = [&](const HostRows& rows, const std::vector<Range>& ranges) {
        found.clear();
        for (const auto& [begin, end] : ranges)
          kernels_.score_range(query, rows.keys_of(head), begin, end, found);
        for (const Found& each : found) tops[row] = std::max(tops[row], each.score);
      };
      score(*request.own, request.others);
      for (const auto& [rows, ranges] : request.attended) {
        score(*rows, ranges);
        std::vector<float> part(size);
        float lse;
        kernels_.attend_found({&found, 1}, rows->values_of(head), nullptr, {}, scale_, part.data(),
                              &lse);
        state_of(row).merge(part.data(), lse, size);
      }
    }

    // scores of the context's keys that every query reads, of each link and row
    std::vector<std::vector<Found>> read(group.context.size() * num_rows);
    for (size_t i = 0; i < read.size(); ++i) {
      const auto& [link, attended] = group.context[i / num_rows];
      const size_t row = i % num_rows;
      const Rows keys = link->parts[head]->searcher->set.view_rows();
      for (const auto& [begin, end] : attended)
        kernels_.score_range(queries.data() + row * size, keys, begin, end, read[i]);
      for (const Found& each : read[i]) tops[row] = std::max(tops[row], each.score);
    }

    SearchOutcome outcome;
    for (size_t r = 0; r < group.requests.size(); ++r)
      for (const LayerSearch* segment : group.requests[r].segments) {
        const size_t first = r * num_queries;
        search(*segment, head, queries.data() + first * size, num_queries, tops.data() + first,
               outcome, totals);
        merge(*segment->parts[head], outcome, [&](size_t q) { return state_of(first + q); });
        // what the next segments are asked reaches down from the best of all
        for (size_t q = 0; q < num_queries; ++q)
          for (const Found& each : outcome.found[q])
            tops[first + q] = std::max(tops[first + q], each.score);
      }
    auto whole = read.cbegin();
    for (const auto& [link, attended] : group.context) {
      search(*link, head, queries.data(), num_rows, tops.data(), outcome, totals);
      for (size_t row = 0; row < num_rows; ++row) {
        std::vector<Found>& all = outcome.found[row];
        for (const Found& each : all) tops[row] = std::max(tops[row], each.score);
        all.insert(all.end(), whole->begin(), whole->end());
        ++whole;
      }
      merge(*link->parts[head], outcome, state_of);
    }
  }

  void search(const LayerSearch& layer, int64_t head, const float* queries, size_t num_queries,
              const float* tops, SearchOutcome& outcome, Totals& totals) const {
    outcome = {};
    const HeadPart& part = *layer.parts[head];
    part.search(queries, num_queries, tops, layer.begin, layer.prefix_len, scale_, outcome);
    totals.add(layer, part, outcome);
  }

  // What the queries found of a head's index.
  template <class StateOf>
  void merge(const HeadPart& head, const SearchOutcome& outcome, const StateOf& state_of) const {
    const size_t num_queries = outcome.found.size();
    std::vector<float> outputs(num_queries * tensors_.size), lses(num_queries);
    head.attend(outcome, scale_, outputs.data(), lses.data());
    for (size_t q = 0; q < num_queries; ++q)
      state_of(q).merge(outputs.data() + q * tensors_.size, lses[q], tensors_.size);
  }

  void read_query(int64_t token, int64_t head, float* out) const {
    with_type(tensors_.type, [&](auto element) {
      const auto* from = static_cast<const decltype(element)*>(tensors_.query) +
                         token * tensors_.query_token_stride + head * tensors_.query_head_stride;
      for (int64_t i = 0; i < tensors_.size; ++i) out[i] = relay::to_float(from[i]);
    });
  }

  // Searches take finite numbers only.
  bool make_finite(float* query) const {
    bool finite = true;
    for (int64_t i = 0; i < tensors_.size; ++i) finite &= std::isfinite(query[i]);
    if (!finite) std::fill_n(query, tensors_.size, 0.f);
    return finite;
  }

  void add_to_output(size_t group, size_t request) {
    const int64_t token = groups_[group]->requests[request].token;
    for (int64_t head = 0; head < tensors_.num_heads(); ++head) {
      const State found = state(group, request, head);
      float* const lse = tensors_.lse + token * tensors_.num_heads() + head;
      with_type(tensors_.type, [&](auto element) {
        using T = decltype(element);
        T* const out = static_cast<T*>(tensors_.output) + token * tensors_.output_token_stride +
                       head * tensors_.output_head_stride;
        found.merge(out, *lse, tensors_.size);
        for (int64_t i = 0; i < tensors_.size; ++i) relay::from_float(found.output[i], out + i);
      });
      *lse = *found.lse;
    }
  }

  const std::vector<const HostGroup*>& groups_;
  const Tensors tensors_;
  const float scale_;
  const IndexKernels& kernels_;
  std::vector<int64_t> first_state_;  // of each group
  int64_t num_states_ = 0;            // of every request and query head
  std::vector<float> outputs_, lses_;
};

std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, float> attend_host(
    const std::vector<const HostGroup*>& groups, int type, int num_kv_heads, int group, int size,
    uintptr_t query, int64_t query_token_stride, int64_t query_head_stride, uintptr_t output,
    int64_t output_token_stride, int64_t output_head_stride, uintptr_t lse, float scale,
    int num_threads) {
  const Tensors tensors{static_cast<ElementType>(type),
                        num_kv_heads,
                        group,
                        size,
                        reinterpret_cast<const void*>(query),
                        query_token_stride,
                        query_head_stride,
                        reinterpret_cast<void*>(output),
                        output_token_stride,
                        output_head_stride,
                        reinterpret_cast<float*>(lse)};
  nb::gil_scoped_release release;
  const Totals total = HostStep(groups, tensors, scale).run(num_threads);
  return {total.searches,  total.searched_tokens, total.retrieved_tokens,
          total.distances, total.bytes,           total.dropped_mass};
}

}  // namespace

void bind_host_attention(nb::module_& module) {
  nb::module_ host = module.def_submodule("host");
  nb::class_<HostRows>(host, "HostRows")
      .def("__init__", [](HostRows* self, AllHeads keys, AllHeads values, int type) {
        new (self) HostRows{std::move(keys), std::move(values), type};
      });
  nb::class_<LayerSearch>(host, "LayerSearch").def(nb::init<nb::list, int64_t, int64_t>());
  nb::class_<HostRequest>(host, "HostRequest")
      .def(
          "__init__",
          [](HostRequest* self, int64_t token, const HostRows* own,
             std::vector<RangesOfRows> attended, std::vector<Range> others,
             std::vector<const LayerSearch*> segments) {
            new (self) HostRequest{token, own, std::move(attended), std::move(others),
                                   std::move(segments)};
          },
          nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::keep_alive<1, 4>(),
          nb::keep_alive<1, 6>());
  nb::class_<HostGroup>(host, "HostGroup")
      .def(
          "__init__",
          [](HostGroup* self, std::vector<HostRequest> requests, std::vector<ContextLink> context) {
            new (self) HostGroup{std::move(requests), std::move(context)};
          },
          nb::arg(), nb::arg(), nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>());
  host.def("attend", &attend_host);
}

// SPDX-License-Identifier: Apache-2.0
// An index as Python made it, ready to be searched, and what a kv head asks of one. Arrays arrive
// as numpy holds them; the Python faces have checked their sizes against each other.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "bindings_guard.h"
#include "index/kernels.h"

namespace relay::index {

template <class T, int Dims>
using Array = nanobind::ndarray<T, nanobind::ndim<Dims>, nanobind::c_contig, nanobind::device::cpu>;
using AnyRows =
    nanobind::ndarray<nanobind::ro, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;

inline Rows rows_of(const AnyRows& array, int type, const PageGuard* guard = nullptr) {
  return {array.data(), static_cast<ElementType>(type), static_cast<int32_t>(array.shape(1)),
          static_cast<int64_t>(array.shape(0)), guard};
}

template <class Rows2D>
GuardArgument guard_of(const Rows2D& rows, nanobind::object guard) {
  return {std::move(guard), rows.data(), rows.shape(0),
          rows.nbytes() / std::max<size_t>(1, rows.shape(0))};
}

// The keys of one head, as codes and as they were given.
struct KeySet {
  AnyRows keys;
  Array<const uint8_t, 2> codes;
  Array<const float, 1> mean, scale;
  int type;
  float longest, longest_error;
  GuardArgument key_guard, code_guard;

  Codes view_codes() const {
    return {codes.data(),
            static_cast<int32_t>(codes.shape(1)),
            static_cast<int32_t>(keys.shape(1)),
            static_cast<int64_t>(keys.shape(0)),
            mean.data(),
            scale.data(),
            longest,
            longest_error,
            code_guard.guard};
  }
  Rows view_rows() const { return rows_of(keys, type, key_guard.guard); }
};

// One index, ready to be searched; keeps the arrays it points to.
class Searcher {
 public:
  Searcher(const std::string& kernel, KeySet set, Array<const int32_t, 1> always)
      : kernels(index_kernels(kernel)), set(std::move(set)), always(std::move(always)) {}
  virtual ~Searcher() = default;
  virtual void search(const SearchRequest& request, SearchOutcome& outcome) const = 0;
  // Read at every hop, besides codes.
  virtual int64_t hop_bytes() const { return 0; }

  SearchRequest request_of(const float* queries, size_t num_queries, int k, float range, int width,
                           const float* window_max, int64_t begin, int64_t prefix_len,
                           const Array<const int32_t, 1>& entries, float scale,
                           float max_dropped_mass, bool weighs_unread = false) const {
    return {queries,
            static_cast<int32_t>(num_queries),
            k,
            range,
            width,
            window_max,
            begin,
            prefix_len,
            scale,
            max_dropped_mass,
            weighs_unread,
            entries.data(),
            static_cast<int32_t>(entries.shape(0)),
            always.data(),
            static_cast<int32_t>(always.shape(0))};
  }

  const IndexKernels& kernels;
  const KeySet set;
  const Array<const int32_t, 1> always;
};

// What one kv head's queries ask of its index.
struct HeadPart {
  const Searcher* searcher;
  AnyRows values;
  int type;
  GuardArgument value_guard;
  Array<const int32_t, 1> entries;
  bool everything;  // attend all keys that count, without a search
  int k;
  float range;
  int width;
  float max_dropped_mass;  // above 1: as much as there is, but say how much; NaN: do not say
  // of `kMeanKeys` values each: what is not found counts by these
  std::optional<AnyRows> value_means;

  Rows view_values() const { return rows_of(values, type, value_guard.guard); }

  // Attention over what a search found: writes outputs [queries, size] and log-sum-exps.
  void attend(const SearchOutcome& outcome, float scale, float* out, float* lse) const;

  // `scale`: of the scores in the softmax.
  void search(const float* queries, size_t num_queries, const float* window_max, int64_t begin,
              int64_t prefix_len, float scale, SearchOutcome& outcome) const;
};

// What a search of a kv head's queries cost: rows of values and of their means that they read, all
// of them together, distinct keys that they found, and bytes of codes.
struct HeadCounts {
  int64_t distances, hops, rescored, value_rows, distinct, code_bytes;
};
HeadCounts counts_of(const HeadPart& part, const SearchOutcome& outcome);

}  // namespace relay::index

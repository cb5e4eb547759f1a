// SPDX-License-Identifier: Apache-2.0
// Answers in their order: best score first, of equal ones the first key.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

#include "../attention/vec16.h"
#include "views.h"

namespace relay::index {
namespace {

inline constexpr auto better = [](const Found& a, const Found& b) {
  return a.score > b.score || (a.score == b.score && a.id < b.id);
};

#if defined(__AVX512F__)
constexpr size_t kFew = 256;

// Larger where `better`; scores are no NaN.
inline uint64_t order_key(const Found& found) {
  const auto bits = std::bit_cast<uint32_t>(found.score + 0.f);  // -0 and 0 are equal
  const uint32_t ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
  return uint64_t{ordered} << 32 | ~static_cast<uint32_t>(found.id);
}

// Each goes to the place that is the number of better ones: no branch that depends on scores.
inline void sort_few(std::vector<Found>& found, size_t keep) {
  alignas(64) uint64_t keys[kFew];
  alignas(64) uint64_t places[8];
  Found given[kFew];
  const size_t count = found.size();
  for (size_t i = 0; i < count; ++i) {
    given[i] = found[i];
    keys[i] = order_key(found[i]);
  }
  std::fill(keys + count, keys + (count + 7) / 8 * 8, 0);
  found.resize(std::min(count, keep));
  const __m512i one = _mm512_set1_epi64(1);
  for (size_t i = 0; i < count; i += 8) {
    const __m512i mine = _mm512_load_si512(keys + i);
    __m512i place = _mm512_setzero_si512();
    for (size_t j = 0; j < count; ++j) {
      const __mmask8 is_better =
          _mm512_cmplt_epu64_mask(mine, _mm512_set1_epi64(static_cast<int64_t>(keys[j])));
      place = _mm512_mask_add_epi64(place, is_better, place, one);
    }
    _mm512_store_si512(places, place);
    for (size_t lane = 0; lane < std::min<size_t>(8, count - i); ++lane)
      if (places[lane] < found.size()) found[places[lane]] = given[i + lane];
  }
}
#endif

// Sorts `found` and leaves the first `keep`; ids differ.
inline void sort_best(std::vector<Found>& found, size_t keep) {
#if defined(__AVX512F__)
  if (found.size() <= kFew) return sort_few(found, keep);
#endif
  if (found.size() > keep) {
    std::nth_element(found.begin(), found.begin() + keep, found.end(), better);
    found.resize(keep);
  }
  std::sort(found.begin(), found.end(), better);
}

}  // namespace
}  // namespace relay::index

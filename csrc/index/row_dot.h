// SPDX-License-Identifier: Apache-2.0
// Inner products of a float query with stored rows, sixteen lanes in a fixed order of summation.
#pragma once

#include "../attention/vec16.h"
#include "views.h"

namespace relay::index {
namespace {

#if defined(__AVX512F__)
RELAY_INLINE Vec16 load_row16(const BFloat16* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(
      _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}
#elif defined(__AVX2__)
RELAY_INLINE Vec16 load_row16(const BFloat16* p) {
  const auto widened = [](const BFloat16* from) {
    const __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(eight), 16));
  };
  return {widened(p), widened(p + 8)};
}
#else
RELAY_INLINE Vec16 load_row16(const BFloat16* p) {
  Vec16 x;
  for (int i = 0; i < kLanes; ++i) x[i] = to_float(p[i]);
  return x;
}
#endif
RELAY_INLINE Vec16 load_row16(const float* p) { return load_elements16(p); }
RELAY_INLINE Vec16 load_row16(const Float16* p) { return load_elements16(p); }

// What float sums of up to 256 products can be off, over the sum of the products' magnitudes.
constexpr double kFloatRounding = 4e-6;

template <class T>
RELAY_INLINE float dot_row(const float* query, const T* row, int size) {
  Vec16 sum = zero16();
  int i = 0;
  for (; i + kLanes <= size; i += kLanes) sum = fma16(load16(query + i), load_row16(row + i), sum);
  float total = sum_of16(sum);
  for (; i < size; ++i) total += query[i] * to_float(row[i]);
  return total;
}

// Where float sums overflow: they can be infinity minus infinity, and NaN has no place in an order.
template <class T>
double dot_row_widely(const float* query, const T* row, int size) {
  double total = 0;
  for (int i = 0; i < size; ++i) total += double{query[i]} * to_float(row[i]);
  return total;
}

// Calls `body` with the rows' own element type.
template <class Body>
void with_elements(const Rows& rows, Body&& body) {
  switch (rows.type) {
    case ElementType::kFloat32:
      return body(static_cast<const float*>(rows.data));
    case ElementType::kFloat16:
      return body(static_cast<const Float16*>(rows.data));
    case ElementType::kBFloat16:
      return body(static_cast<const BFloat16*>(rows.data));
  }
}

}  // namespace
}  // namespace relay::index

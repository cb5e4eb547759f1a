// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <omp.h>

#include <cmath>

#include "row_dot.h"
#include "views.h"

namespace relay::index {
namespace {

struct CodeNorms {
  float longest = 0.f, longest_error = 0.f;  // see Codes
};

// Writes the codes of rows [begin, end) of `keys`, row `begin` first. A key that does not fit
// into the range of a code becomes the mean key and its place in `outside` 1.
inline CodeNorms encode_keys(const Rows& keys, const float* mean, const float* scale, int64_t begin,
                             int64_t end, uint8_t* out, int64_t stride, uint8_t* outside,
                             int num_threads) {
  float longest = 0.f, longest_error = 0.f;
  with_elements(keys, [&](const auto* rows) {
#pragma omp parallel for num_threads(num_threads) reduction(max : longest, longest_error)
    for (int64_t i = begin; i < end; ++i) {
      const auto* row = rows + i * keys.size;
      uint8_t* code = out + (i - begin) * stride;
      float norm = 0.f, error = 0.f;
      bool fits = true;
      for (int32_t d = 0; d < keys.size; ++d) {
        const float exact = (to_float(row[d]) - mean[d]) / scale[d];
        const float steps = std::nearbyintf(exact);
        fits &= std::fabs(steps) <= 127.f;
        code[d] = static_cast<uint8_t>(128 + static_cast<int>(fits ? steps : 0.f));
        norm += steps * steps;
        error += (exact - steps) * (exact - steps);
      }
      for (int64_t d = keys.size; d < stride; ++d) code[d] = 128;
      outside[i - begin] = !fits;
      if (fits) {
        longest = std::max(longest, norm);
        longest_error = std::max(longest_error, error);
      } else {
        for (int32_t d = 0; d < keys.size; ++d) code[d] = 128;
      }
    }
  });
  // a little more, for the rounding of these very sums
  return {1.0001f * std::sqrt(longest), 1.0001f * std::sqrt(longest_error)};
}

}  // namespace
}  // namespace relay::index

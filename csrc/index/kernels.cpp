// SPDX-License-Identifier: Apache-2.0
#include "kernels.h"

#include <stdexcept>
#include <string>

#include "../common/cpu_features.h"
#include "damage.h"

namespace relay::index {

extern const IndexKernels kIndexKernelsPortable;
extern const IndexKernels kIndexKernelsAvx2;
extern const IndexKernels kIndexKernelsAvx512Vnni;

namespace {

const IndexKernels* const kAll[] = {
#if RELAY_HAVE_AVX512_VNNI
    &kIndexKernelsAvx512Vnni,
#endif
#if RELAY_HAVE_AVX2
    &kIndexKernelsAvx2,
#endif
    &kIndexKernelsPortable,
};

}  // namespace

const IndexKernels& index_kernels(std::string_view name) {
  for (const IndexKernels* kernels : kAll)
    if ((name == "auto" || name == kernels->name) && kernels->runs_here()) return *kernels;
  throw std::invalid_argument("index kernel '" + std::string(name) + "' cannot run here");
}

void throw_damaged_row(const char* what, int64_t row) {
  throw DamagedIndexError("row " + std::to_string(row) + ": " + what);
}

std::vector<std::string_view> index_kernel_names() {
  std::vector<std::string_view> names;
  for (const IndexKernels* kernels : kAll)
    if (kernels->runs_here()) names.push_back(kernels->name);
  return names;
}

}  // namespace relay::index

// SPDX-License-Identifier: Apache-2.0
// Checksums of stored contexts, as vllm_relay/sparse/checksum.py calls them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "bindings.h"
#include "storage/crc32c.h"
#include "storage/page_checksums.h"

namespace nb = nanobind;

namespace {

template <class T>
using Array = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::vector<std::string> kernel_names() {
  std::vector<std::string> names;
  for (int i = 0; i < relay::kNumCrc32cKernels; ++i)
    if (relay::kCrc32cKernels[i].runs_here()) names.emplace_back(relay::kCrc32cKernels[i].name);
  return names;
}

relay::Crc32cFunction find_kernel(const std::string& name) {
  if (name == "auto") return relay::crc32c();
  for (int i = 0; i < relay::kNumCrc32cKernels; ++i) {
    const relay::Crc32cKernel& kernel = relay::kCrc32cKernels[i];
    if (kernel.name == name && kernel.runs_here()) return kernel.run;
  }
  throw std::invalid_argument("checksum kernel '" + name + "' cannot run here");
}

relay::Pages pages_of(const Array<const uint8_t>& data, size_t page_bytes) {
  if (page_bytes == 0) throw std::invalid_argument("page_bytes is 0, expected a positive number");
  return {data.data(), data.size(), page_bytes};
}

uint32_t crc32c(const Array<const uint8_t>& data, uint32_t crc, const std::string& kernel) {
  const relay::Crc32cFunction run = find_kernel(kernel);
  const uint8_t* begin = data.data();
  const size_t bytes = data.size();
  nb::gil_scoped_release release;
  return run(crc, begin, bytes);
}

void checksum_pages(const Array<const uint8_t>& data, size_t page_bytes,
                    const Array<uint32_t>& checksums) {
  const relay::Pages pages = pages_of(data, page_bytes);
  if (checksums.size() != pages.count())
    throw std::invalid_argument("checksums: given " + std::to_string(checksums.size()) +
                                ", expected " + std::to_string(pages.count()));
  uint32_t* output = checksums.data();
  nb::gil_scoped_release release;
  relay::checksum_pages(pages, relay::crc32c(), output);
}

nb::tuple find_damage(const Array<const uint8_t>& data, size_t page_bytes,
                      const Array<const uint32_t>& checksums, const Array<const int64_t>& chosen,
                      bool mapped) {
  const relay::Pages pages = pages_of(data, page_bytes);
  if (checksums.size() != pages.count())
    throw std::invalid_argument("checksums: given " + std::to_string(checksums.size()) +
                                ", expected " + std::to_string(pages.count()));
  const uint32_t* expected = checksums.data();
  const int64_t* begin = chosen.data();
  const size_t num_chosen = chosen.size();
  for (size_t i = 0; i < num_chosen; ++i)
    if (begin[i] < 0 || static_cast<size_t>(begin[i]) >= pages.count())
      throw std::invalid_argument("page " + std::to_string(begin[i]) + " of " +
                                  std::to_string(pages.count()));
  relay::PageDamage damage;
  {
    nb::gil_scoped_release release;
    damage = relay::find_damage(pages, relay::crc32c(), expected, begin, num_chosen, mapped);
  }
  return nb::make_tuple(damage.page, damage.found, damage.readable);
}

}  // namespace

void bind_storage(nb::module_& module) {
  module.def("crc32c_kernels", &kernel_names);
  module.def("crc32c", &crc32c, nb::arg("data"), nb::arg("crc") = 0, nb::arg("kernel") = "auto");
  module.def("checksum_pages", &checksum_pages, nb::arg("data"), nb::arg("page_bytes"),
             nb::arg("checksums").noconvert());
  module.def("find_damage", &find_damage, nb::arg("data"), nb::arg("page_bytes"),
             nb::arg("checksums"), nb::arg("chosen"), nb::arg("mapped"));
}

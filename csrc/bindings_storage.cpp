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
#include "bindings_guard.h"
#include "index/damage.h"
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

void check_checksums(const relay::Pages& pages, size_t num_checksums) {
  if (num_checksums != pages.count())
    throw std::invalid_argument("checksums: given " + std::to_string(num_checksums) +
                                ", expected " + std::to_string(pages.count()));
}

void checksum_pages(const Array<const uint8_t>& data, size_t page_bytes,
                    const Array<uint32_t>& checksums) {
  const relay::Pages pages = pages_of(data, page_bytes);
  check_checksums(pages, checksums.size());
  uint32_t* output = checksums.data();
  nb::gil_scoped_release release;
  relay::checksum_pages(pages, relay::crc32c(), output);
}

void check_chosen(const relay::Pages& pages, const Array<const int64_t>& chosen) {
  const int64_t* begin = chosen.data();
  for (size_t i = 0; i < chosen.size(); ++i)
    if (begin[i] < 0 || static_cast<size_t>(begin[i]) >= pages.count())
      throw std::invalid_argument("page " + std::to_string(begin[i]) + " of " +
                                  std::to_string(pages.count()));
}

// (-1, 0): all pages are as they should be.
nb::tuple find_damage(const Array<const uint8_t>& data, size_t page_bytes,
                      const Array<const uint32_t>& checksums) {
  const relay::Pages pages = pages_of(data, page_bytes);
  check_checksums(pages, checksums.size());
  const uint32_t* expected = checksums.data();
  relay::PageDamage damage;
  {
    nb::gil_scoped_release release;
    damage = relay::find_damage(pages, relay::crc32c(), expected, 0, pages.count(),
                                relay::Mapping::kNone);
  }
  return nb::make_tuple(damage.page, damage.found);
}

void verify(const BoundGuard& guard, const Array<const int64_t>& chosen) {
  check_chosen(guard.pages(), chosen);
  nb::gil_scoped_release release;
  for (size_t i = 0; i < chosen.size(); ++i) guard.verify(static_cast<size_t>(chosen.data()[i]));
}

void raise_damage(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const relay::DamagedPageError& error) {
    const auto& guard = static_cast<const BoundGuard&>(*error.guard);
    const relay::PageDamage& damage = error.damage;
    try {
      const nb::object raised =
          guard.on_damage(damage.page, damage.readable ? nb::cast(damage.found) : nb::none());
      PyErr_SetObject(raised.type().ptr(), raised.ptr());
    } catch (nb::python_error& other) {
      other.restore();
    }
  } catch (const relay::index::DamagedIndexError& error) {
    try {
      const nb::object type =
          nb::module_::import_("vllm_relay.sparse.files.damage").attr("IndexDamagedError");
      PyErr_SetString(type.ptr(), error.what());
    } catch (nb::python_error& other) {
      other.restore();
    }
  }
}

}  // namespace

void bind_storage(nb::module_& module) {
  nb::register_exception_translator(&raise_damage);
  nb::class_<BoundGuard>(module, "PageGuard")
      .def(
          "__init__",
          [](BoundGuard* self, Array<const uint8_t> data, size_t page_bytes,
             Array<const uint32_t> checksums, nb::object on_damage, bool is_mapped, bool is_own,
             size_t around_bytes) {
            check_checksums(pages_of(data, page_bytes), checksums.size());
            if (is_mapped && around_bytes == 0)
              throw std::invalid_argument("around_bytes is 0, expected a positive number");
            const auto mapping = !is_mapped ? relay::Mapping::kNone
                                 : is_own   ? relay::Mapping::kOwnFile
                                            : relay::Mapping::kFile;
            new (self) BoundGuard(std::move(data), page_bytes, std::move(checksums), mapping,
                                  around_bytes, std::move(on_damage));
          },
          nb::arg("data"), nb::arg("page_bytes"), nb::arg("checksums"), nb::arg("on_damage"),
          nb::kw_only(), nb::arg("is_mapped") = false, nb::arg("is_own") = false,
          nb::arg("around_bytes") = 4096)
      .def("verify", &verify, nb::arg("pages"))
      .def("verify_all",
           [](const BoundGuard& guard) {
             nb::gil_scoped_release release;
             guard.verify(0, guard.pages().count());
           })
      .def("verify_anew", [](const BoundGuard& guard) {
        nb::gil_scoped_release release;
        guard.verify_anew(0, guard.pages().count());
      });
  module.def("crc32c_kernels", &kernel_names);
  module.def("crc32c", &crc32c, nb::arg("data"), nb::arg("crc") = 0, nb::arg("kernel") = "auto");
  module.def("checksum_pages", &checksum_pages, nb::arg("data"), nb::arg("page_bytes"),
             nb::arg("checksums").noconvert());
  module.def("find_damage", &find_damage, nb::arg("data"), nb::arg("page_bytes"),
             nb::arg("checksums"));
}

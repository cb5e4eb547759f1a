// SPDX-License-Identifier: Apache-2.0
// Orders of requests' KV blocks, as vllm_relay/attention_backends/block_order.py calls them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "attention/block_order.h"
#include "bindings.h"

namespace nb = nanobind;

namespace {

using relay::BlockOrder;
using Int64s = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::span<const int64_t> view(const Int64s& array) { return {array.data(), array.size()}; }

// A numpy array of T that owns the values.
template <class T, class Value, class... Sizes>
nb::object array_of(std::vector<Value>&& values, Sizes... sizes) {
  auto* owned = new std::vector<Value>(std::move(values));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<Value>*>(p); });
  return nb::cast(
      nb::ndarray<nb::numpy, T, nb::ndim<sizeof...(Sizes)>>(owned->data(), {sizes...}, owner));
}

// int64 [rows], 0 where a row is negative.
nb::object num_blocks(const BlockOrder& order, const Int64s& rows) {
  std::vector<int64_t> counts;
  for (const int64_t row : view(rows)) counts.push_back(int64_t(order.blocks(row).size()));
  const size_t size = counts.size();
  return array_of<int64_t>(std::move(counts), size);
}

// int32 [rows, blocks], zeros behind those of a row.
nb::object block_table(const BlockOrder& order, const Int64s& rows) {
  size_t width = 0;
  for (const int64_t row : view(rows)) width = std::max(width, order.blocks(row).size());
  std::vector<int32_t> table(rows.size() * width);
  for (size_t i = 0; i < rows.size(); ++i)
    std::copy(order.blocks(rows(i)).begin(), order.blocks(rows(i)).end(), table.data() + i * width);
  return array_of<int32_t>(std::move(table), rows.size(), width);
}

// BlockOrder::Forest: int32 [requests], int32 [nodes, 5], bool.
nb::tuple forest(BlockOrder& order, const Int64s& rows, const Int64s& limits) {
  BlockOrder::Forest found = order.forest(view(rows), view(limits));
  const size_t requests = found.order.size(), nodes = found.nodes.size();
  return nb::make_tuple(array_of<int32_t>(std::move(found.order), requests),
                        array_of<int32_t>(std::move(found.nodes), nodes, size_t(5)),
                        found.has_nulls);
}

}  // namespace

void bind_block_order(nb::module_& module) {
  nb::class_<BlockOrder>(module, "BlockOrder")
      .def(nb::init<>())
      .def("begin", &BlockOrder::begin)
      .def("append", &BlockOrder::append)
      .def("end", &BlockOrder::end)
      .def("num_blocks", &num_blocks)
      .def("block_table", &block_table)
      .def("forest", &forest);
}

// SPDX-License-Identifier: Apache-2.0
// Only this file and bindings_*.cpp know Python. Tensors arrive as addresses and sizes that the
// Python faces have checked; plan arrays arrive as contiguous int32 arrays.
#include "bindings.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "attention/kernels.h"
#include "attention/plan_work.h"
#include "common/cpu_features.h"

namespace nb = nanobind;

namespace {

using Int32Table = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Views a plan array as structs of `Columns` int32 each.
template <class Row>
const Row* rows_of(const Int32Table& table, const char* name) {
  constexpr size_t columns = sizeof(Row) / sizeof(int32_t);
  if (table.shape(1) != columns)
    throw std::invalid_argument(std::string(name) + ": expected " + std::to_string(columns) +
                                " columns, got " + std::to_string(table.shape(1)));
  return reinterpret_cast<const Row*>(table.data());
}

std::vector<std::string> kernel_names(bool only_usable) {
  std::vector<std::string> names;
  for (int i = 0; i < relay::kNumKernels; ++i) {
    const relay::KernelInfo& kernel = relay::kKernels[i];
    if (kernel.run && (!only_usable || kernel.runs_here())) names.emplace_back(kernel.name);
  }
  if (only_usable && relay::cpu_features().avx512_bf16_is_slow) {
    const auto bf16 = std::find(names.begin(), names.end(), "avx512_bf16");
    const auto fp32 = std::find(bf16, names.end(), "avx512");
    if (fp32 != names.end()) std::rotate(bf16, fp32, fp32 + 1);
  }
  return names;
}

const relay::KernelInfo& find_kernel(const std::string& name, relay::DType type) {
  for (int i = 0; i < relay::kNumKernels; ++i) {
    const relay::KernelInfo& kernel = relay::kKernels[i];
    if (kernel.name != name || !kernel.run) continue;
    if (!kernel.runs_here()) throw std::invalid_argument("kernel '" + name + "' cannot run here");
    if (!kernel.takes(type))
      throw std::invalid_argument("kernel '" + name + "' does not take this dtype");
    return kernel;
  }
  throw std::invalid_argument("kernel '" + name + "' is not in this build of vllm-relay");
}

template <class T>
const T* address(uintptr_t value) {
  return reinterpret_cast<const T*>(value);
}

// A plan and the arrays it points into; made once a step for all layers.
struct PlanHolder {
  relay::Plan plan{};
  std::vector<Int32Table> tables;

  // Tables by their names in relay::Plan.
  PlanHolder(const nb::dict& named, int max_block_entries, int num_partial_entries, int num_scores,
             int num_threads, bool heads_first, bool hides_tokens) {
    const auto rows = [&](auto& rows, const char* name) {
      const Int32Table& table = tables.emplace_back(nb::cast<Int32Table>(named[name]));
      rows = rows_of<std::remove_cvref_t<decltype(*rows)>>(table, name);
      return static_cast<int32_t>(table.shape(0));
    };
    rows(plan.entries, "entries");
    rows(plan.spans, "spans");
    rows(plan.row_blocks, "row_blocks");
    rows(plan.divisions, "divisions");
    plan.num_items = rows(plan.items, "items");
    plan.num_score_items = rows(plan.score_items, "score_items");
    plan.num_weight_items = rows(plan.weight_items, "weight_items");
    plan.num_value_items = rows(plan.value_items, "value_items");
    plan.num_merges = rows(plan.merges, "merges");
    plan.max_block_entries = max_block_entries;
    plan.num_partial_entries = num_partial_entries;
    plan.num_scores = num_scores;
    plan.num_threads = num_threads;
    plan.heads_first = heads_first;
    plan.hides_tokens = hides_tokens;
  }
};

// Rows of int32 as a numpy array that owns them.
template <class Row>
nb::object table_of(std::vector<Row>&& rows) {
  auto* owned = new std::vector<Row>(std::move(rows));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<Row>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, int32_t, nb::ndim<2>>(
      owned->data(), {owned->size(), sizeof(Row) / sizeof(int32_t)}, owner));
}

// `span_costs` is [spans, 4] as in SpanCost. Returns the tables of a WorkList by name, and the
// numbers beside them.
nb::dict plan_work(
    const Int32Table& entries, const Int32Table& spans, const Int32Table& row_blocks,
    const nb::ndarray<const double, nb::ndim<2>, nb::c_contig, nb::device::cpu>& span_costs,
    double merge_ns, double share_ns, double largest_ns, double good_ns, int group_size,
    int num_kv_heads, int dim_groups, int num_threads, bool heads_first, bool may_divide) {
  static_assert(sizeof(relay::SpanCost) == 4 * sizeof(double));
  const relay::WorkToPlan work{rows_of<relay::Entry>(entries, "entries"),
                               rows_of<relay::Span>(spans, "spans"),
                               reinterpret_cast<const relay::SpanCost*>(span_costs.data()),
                               rows_of<relay::RowBlock>(row_blocks, "row_blocks"),
                               static_cast<int>(row_blocks.shape(0)),
                               merge_ns,
                               share_ns,
                               largest_ns,
                               good_ns,
                               group_size,
                               num_kv_heads,
                               dim_groups,
                               num_threads,
                               heads_first,
                               may_divide};
  relay::WorkList list = relay::plan_work(work);
  nb::dict result;
  result["items"] = table_of(std::move(list.items));
  result["divisions"] = table_of(std::move(list.divisions));
  result["score_items"] = table_of(std::move(list.score_items));
  result["weight_items"] = table_of(std::move(list.weight_items));
  result["value_items"] = table_of(std::move(list.value_items));
  result["merges"] = table_of(std::move(list.merges));
  result["num_partial_entries"] = list.num_partial_entries;
  result["num_scores"] = list.num_scores;
  result["makespan_ns"] = list.makespan_ns;
  return result;
}

void run_attention(const std::string& kernel, const PlanHolder& holder, int dtype, int num_heads,
                   int num_kv_heads, int head_size, int block_size, uintptr_t query,
                   int64_t query_token_stride, int64_t query_head_stride, uintptr_t kv_cache,
                   bool is_float8, float v_scale, int64_t kv_block_stride, int64_t kv_head_stride,
                   uintptr_t block_table, int64_t block_table_stride, uintptr_t output,
                   int64_t output_token_stride, int64_t output_head_stride, uintptr_t lse,
                   float scale, float logits_soft_cap, int sliding_window, uintptr_t alibi_slopes,
                   uintptr_t sinks) {
  relay::Problem problem{};
  problem.dtype = static_cast<relay::DType>(dtype);
  const relay::KernelInfo& info = find_kernel(kernel, problem.dtype);
  problem.num_heads = num_heads;
  problem.num_kv_heads = num_kv_heads;
  problem.head_size = head_size;
  problem.block_size = block_size;
  problem.query = address<void>(query);
  problem.query_token_stride = query_token_stride;
  problem.query_head_stride = query_head_stride;
  problem.kv_cache = address<void>(kv_cache);
  problem.is_float8 = is_float8;
  problem.v_scale = v_scale;
  problem.kv_block_stride = kv_block_stride;
  problem.kv_head_stride = kv_head_stride;
  problem.block_table = address<int32_t>(block_table);
  problem.block_table_stride = block_table_stride;
  problem.output = reinterpret_cast<void*>(output);
  problem.output_token_stride = output_token_stride;
  problem.output_head_stride = output_head_stride;
  problem.lse = reinterpret_cast<float*>(lse);
  problem.scale = scale;
  problem.logits_soft_cap = logits_soft_cap;
  problem.sliding_window = sliding_window;
  problem.alibi_slopes = address<float>(alibi_slopes);
  problem.sinks = address<float>(sinks);
  nb::gil_scoped_release release;
  info.run(problem, holder.plan);
}

// Tables are those of unpacked.h; `addresses` is [runs, kv_heads, keys and values].
void run_unpacked_attention(
    const std::string& kernel, const Int32Table& requests, const Int32Table& runs,
    const nb::ndarray<const uint64_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>& addresses,
    const Int32Table& blocks, const Int32Table& items, int max_item_rows, int num_segments,
    bool splits_segments, int num_threads, int dtype, int num_heads, int num_kv_heads,
    int head_size, uintptr_t query, int64_t query_token_stride, int64_t query_head_stride,
    uintptr_t output, int64_t output_token_stride, int64_t output_head_stride, bool float_output,
    uintptr_t lse, float scale) {
  static_assert(sizeof(relay::KvAddress) == 2 * sizeof(uint64_t));
  relay::Problem problem{};
  problem.dtype = static_cast<relay::DType>(dtype);
  const relay::KernelInfo& info = find_kernel(kernel, problem.dtype);
  problem.num_heads = num_heads;
  problem.num_kv_heads = num_kv_heads;
  problem.head_size = head_size;
  problem.query = address<void>(query);
  problem.query_token_stride = query_token_stride;
  problem.query_head_stride = query_head_stride;
  problem.output = reinterpret_cast<void*>(output);
  problem.output_token_stride = output_token_stride;
  problem.output_head_stride = output_head_stride;
  problem.lse = reinterpret_cast<float*>(lse);
  problem.scale = scale;
  relay::Unpacked unpacked{};
  unpacked.requests = rows_of<relay::UnpackedRequest>(requests, "requests");
  unpacked.runs = rows_of<relay::TokenRun>(runs, "runs");
  unpacked.addresses = reinterpret_cast<const relay::KvAddress*>(addresses.data());
  unpacked.blocks = rows_of<relay::UnpackedBlock>(blocks, "blocks");
  unpacked.items = rows_of<relay::UnpackedItem>(items, "items");
  unpacked.num_blocks = static_cast<int32_t>(blocks.shape(0));
  unpacked.num_items = static_cast<int32_t>(items.shape(0));
  for (int32_t b = 0; b < unpacked.num_blocks; ++b)
    unpacked.num_rows += (unpacked.blocks[b].last_query - unpacked.blocks[b].first_query) *
                         (num_heads / num_kv_heads);
  unpacked.max_item_rows = max_item_rows;
  unpacked.num_segments = num_segments;
  unpacked.num_threads = num_threads;
  unpacked.splits_segments = splits_segments;
  unpacked.float_output = float_output;
  nb::gil_scoped_release release;
  info.run_unpacked(problem, unpacked);
}

void run_write(int dtype, int num_tokens, int num_kv_heads, int head_size, int block_size,
               int num_threads, uintptr_t key, int64_t key_token_stride, int64_t key_head_stride,
               uintptr_t value, int64_t value_token_stride, int64_t value_head_stride,
               uintptr_t kv_cache, bool is_float8, float k_scale, float v_scale,
               int64_t kv_block_stride, int64_t kv_head_stride, uintptr_t slots) {
  const relay::KvWrite write{static_cast<relay::DType>(dtype),
                             num_tokens,
                             num_kv_heads,
                             head_size,
                             block_size,
                             num_threads,
                             address<void>(key),
                             key_token_stride,
                             key_head_stride,
                             address<void>(value),
                             value_token_stride,
                             value_head_stride,
                             reinterpret_cast<void*>(kv_cache),
                             is_float8,
                             k_scale,
                             v_scale,
                             kv_block_stride,
                             kv_head_stride,
                             address<int64_t>(slots)};
  nb::gil_scoped_release release;
  relay::write_kv_cache(write);
}

nb::dict cpu_features() {
  const relay::CpuFeatures& features = relay::cpu_features();
  nb::dict result;
  result["avx512"] = features.avx512;
  result["avx512_bf16"] = features.avx512_bf16;
  result["avx512_bf16_is_slow"] = features.avx512_bf16_is_slow;
  result["amx_bf16"] = features.amx_bf16;
  result["neon"] = features.neon;
  result["neon_bf16"] = features.neon_bf16;
  result["sse42"] = features.sse42;
  result["avx512_vpclmulqdq"] = features.avx512_vpclmulqdq;
  return result;
}

}  // namespace

NB_MODULE(_C, module) {
  module.attr("SEGMENT_TOKENS") = relay::kSegmentTokens;
  module.def("compiled_kernels", [] { return kernel_names(false); });
  module.def("supported_kernels", [] { return kernel_names(true); });
  module.def("cpu_features", &cpu_features);
  nb::class_<PlanHolder>(module, "Plan")
      .def(nb::init<const nb::dict&, int, int, int, int, bool, bool>());
  module.def("plan_work", &plan_work);
  module.def("attention", &run_attention);
  module.def("unpacked_attention", &run_unpacked_attention);
  module.def("write_kv_cache", &run_write);
  bind_block_order(module);
  bind_host_attention(module);
  bind_index(module);
  bind_storage(module);
}

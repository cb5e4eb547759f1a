// SPDX-License-Identifier: Apache-2.0
// Attention kernels of another CPU, behind a pipe: reads problems and their plans from stdin,
// writes outputs to stdout. tests/attention_backends/aarch64/emulated.py is the other end, and says
// what is sent in which order.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "attention/kernels.h"
#include "common/cpu_features.h"

namespace {

void read_bytes(void* to, size_t bytes) {
  if (std::fread(to, 1, bytes, stdin) != bytes) std::exit(0);  // the other end is gone
}

void write_bytes(const void* from, size_t bytes) {
  if (std::fwrite(from, 1, bytes, stdout) != bytes) std::exit(1);
}

template <class T>
T read_one() {
  T value;
  read_bytes(&value, sizeof value);
  return value;
}

// An array, after its size in bytes.
std::vector<char> read_array() {
  std::vector<char> bytes(static_cast<size_t>(read_one<int64_t>()));
  read_bytes(bytes.data(), bytes.size());
  return bytes;
}

template <class T>
const T* as(const std::vector<char>& bytes) {
  return bytes.empty() ? nullptr : reinterpret_cast<const T*>(bytes.data());
}

// Points `rows` at them; returns how many there are.
template <class Row>
int32_t rows_of(const std::vector<char>& bytes, const Row** rows) {
  *rows = as<Row>(bytes);
  return static_cast<int32_t>(bytes.size() / sizeof(Row));
}

const relay::KernelInfo* find(const std::vector<char>& name) {
  for (int i = 0; i < relay::kNumKernels; ++i)
    if (relay::kKernels[i].name == std::string_view(name.data(), name.size()))
      return &relay::kKernels[i];
  return nullptr;
}

void attend() {
  const std::vector<char> name = read_array();
  const relay::KernelInfo* kernel = find(name);
  if (!kernel || !kernel->run || !kernel->runs_here()) std::exit(3);

  relay::Problem problem{};
  problem.dtype = static_cast<relay::DType>(read_one<int32_t>());
  problem.num_heads = read_one<int32_t>();
  problem.num_kv_heads = read_one<int32_t>();
  problem.head_size = read_one<int32_t>();
  problem.block_size = read_one<int32_t>();
  problem.sliding_window = read_one<int32_t>();
  const int64_t tokens = read_one<int32_t>(), table_columns = read_one<int32_t>();
  problem.is_float8 = read_one<int32_t>() != 0;
  problem.scale = read_one<float>();
  problem.logits_soft_cap = read_one<float>();
  problem.v_scale = read_one<float>();

  relay::Plan plan{};
  plan.max_block_entries = read_one<int32_t>();
  plan.num_partial_entries = read_one<int32_t>();
  plan.num_scores = read_one<int32_t>();
  plan.num_threads = read_one<int32_t>();
  plan.heads_first = read_one<int32_t>() != 0;
  plan.hides_tokens = read_one<int32_t>() != 0;

  const std::vector<char> query = read_array(), kv_cache = read_array(), table = read_array(),
                          slopes = read_array(), sinks = read_array(), entries = read_array(),
                          spans = read_array(), row_blocks = read_array(), items = read_array(),
                          divisions = read_array(), score_items = read_array(),
                          weight_items = read_array(), value_items = read_array(),
                          merges = read_array();
  problem.query = query.data();
  problem.query_head_stride = problem.head_size;
  problem.query_token_stride = int64_t{problem.num_heads} * problem.head_size;
  problem.kv_cache = kv_cache.data();
  problem.kv_head_stride = 2LL * problem.block_size * problem.head_size;
  problem.kv_block_stride = problem.num_kv_heads * problem.kv_head_stride;
  problem.block_table = as<int32_t>(table);
  problem.block_table_stride = table_columns;
  problem.alibi_slopes = as<float>(slopes);
  problem.sinks = as<float>(sinks);
  plan.entries = as<relay::Entry>(entries);
  plan.spans = as<relay::Span>(spans);
  plan.row_blocks = as<relay::RowBlock>(row_blocks);
  plan.divisions = as<relay::Division>(divisions);
  plan.num_items = rows_of(items, &plan.items);
  plan.num_score_items = rows_of(score_items, &plan.score_items);
  plan.num_weight_items = rows_of(weight_items, &plan.weight_items);
  plan.num_value_items = rows_of(value_items, &plan.value_items);
  plan.num_merges = rows_of(merges, &plan.merges);

  std::vector<char> output(query.size());
  std::vector<float> lse(static_cast<size_t>(tokens * problem.num_heads));
  problem.output = output.data();
  problem.output_head_stride = problem.query_head_stride;
  problem.output_token_stride = problem.query_token_stride;
  problem.lse = lse.data();
  kernel->run(problem, plan);
  write_bytes(output.data(), output.size());
  write_bytes(lse.data(), lse.size() * sizeof(float));
  std::fflush(stdout);
}

}  // namespace

int main() {
  for (;;) attend();
}

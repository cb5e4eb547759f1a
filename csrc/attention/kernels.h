// SPDX-License-Identifier: Apache-2.0
// The attention kernels, one per instruction set, and which of them this build and this machine
// have.
#pragma once

#include <string_view>

#include "problem.h"
#include "unpacked.h"

#ifndef RELAY_HAVE_AVX2
#define RELAY_HAVE_AVX2 0
#endif
#ifndef RELAY_HAVE_AVX512
#define RELAY_HAVE_AVX512 0
#endif
#ifndef RELAY_HAVE_AVX512_BF16
#define RELAY_HAVE_AVX512_BF16 0
#endif
#ifndef RELAY_HAVE_AMX_BF16
#define RELAY_HAVE_AMX_BF16 0
#endif
#ifndef RELAY_HAVE_NEON
#define RELAY_HAVE_NEON 0
#endif
#ifndef RELAY_HAVE_NEON_BF16
#define RELAY_HAVE_NEON_BF16 0
#endif

namespace relay {

using AttentionFunction = void (*)(const Problem&, const Plan&);
using UnpackedFunction = void (*)(const Problem&, const Unpacked&);

struct KernelInfo {
  std::string_view name;
  AttentionFunction run;          // null: left out of this build
  UnpackedFunction run_unpacked;  // the same over tokens that are in no KV cache
  bool (*runs_here)();            // does this machine have the instructions?
  bool (*takes)(DType type);
};

// The order of preference; those after the portable one run only when asked for by name.
extern const KernelInfo kKernels[];
extern const int kNumKernels;

void attention_portable(const Problem&, const Plan&);
void attention_portable(const Problem&, const Unpacked&);
void attention_avx2(const Problem&, const Plan&);
void attention_avx2(const Problem&, const Unpacked&);
void attention_neon(const Problem&, const Plan&);
void attention_neon(const Problem&, const Unpacked&);
void attention_neon_bf16(const Problem&, const Plan&);
void attention_neon_bf16(const Problem&, const Unpacked&);
void attention_avx512(const Problem&, const Plan&);
void attention_avx512(const Problem&, const Unpacked&);
void attention_avx512_bf16(const Problem&, const Plan&);
void attention_avx512_bf16(const Problem&, const Unpacked&);
void attention_avx512_bf16_rounded(const Problem&, const Plan&);
void attention_avx512_bf16_rounded(const Problem&, const Unpacked&);
void attention_amx_bf16(const Problem&, const Plan&);
void attention_amx_bf16(const Problem&, const Unpacked&);
void attention_amx_bf16_emulated(const Problem&, const Plan&);
void attention_amx_bf16_emulated(const Problem&, const Unpacked&);

struct KvWrite {
  DType dtype;
  int32_t num_tokens, num_kv_heads, head_size, block_size, num_threads;
  const void* key;  // [tokens, kv_heads, head_size], strides in elements
  int64_t key_token_stride, key_head_stride;
  const void* value;
  int64_t value_token_stride, value_head_stride;
  void* kv_cache;
  bool is_float8;  // the cache: keys and values are divided by their scales and rounded
  float k_scale, v_scale;
  int64_t kv_block_stride, kv_head_stride;
  const int64_t* slots;  // [tokens], negative: skip
};

// Packs keys and values of new tokens into their slots.
void write_kv_cache(const KvWrite&);

}  // namespace relay

// SPDX-License-Identifier: Apache-2.0
// Where the keys and values of a block table row are, and asking for them ahead of their use.
#pragma once

#include <cstdint>

#include "vec16.h"

namespace relay {
namespace {

// One block table row, seen by one kv head.
struct KvRow {
  const char* head;  // kv_cache + kv_head * kv_head_stride
  int64_t block_stride_bytes;
  const int32_t* blocks;  // null: all tokens are in one block, at their offsets in it
  int block_size, head_size, element_bytes;
  int end_token;                // of the range that is read
  const KvRow* then = nullptr;  // what is read after it, from then_begin on, if that is known
  int then_begin = 0;

  RELAY_INLINE const char* block(int token) const {
    return blocks ? head + blocks[token / block_size] * block_stride_bytes : head;
  }
  RELAY_INLINE int block_end(int token) const { return (token / block_size + 1) * block_size; }
  // The packed keys of 16 tokens; `token` is a multiple of 16.
  RELAY_INLINE const void* key_group(int token) const {
    return block(token) + int64_t{token % block_size} * head_size * element_bytes;
  }
  // The line of 16 dims of values that starts at `token`, a multiple of the elements packed.
  RELAY_INLINE const void* value_line(int token, int dim_group) const {
    const int64_t elements = int64_t{block_size} * (head_size + dim_group * kLanes) +
                             int64_t{token % block_size} * kLanes;
    return block(token) + elements * element_bytes;
  }
};

// Asks for the blocks that are read next a few lines at a time, so that memory and arithmetic work
// side by side.
class BlockPrefetch {
 public:
  BlockPrefetch() = default;
  // The blocks that begin among the next `tokens` tokens after token `begin` of `kv`; without their
  // values if only keys are read.
  BlockPrefetch(const KvRow& kv, int begin, int tokens, bool only_keys = false)
      : kv_(&kv), token_(begin), only_keys_(only_keys) {
    if (begin >= kv.end_token && kv.then) {
      kv_ = kv.then;
      token_ = kv.then_begin;
    } else if (begin % kv.block_size != 0) {
      token_ = kv.block_end(begin);  // this block was asked for when it began
    }
    end_ = token_ + tokens < kv_->end_token ? token_ + tokens : kv_->end_token;
  }

  template <int Lines>
  RELAY_INLINE void next() {
    static_assert(kMaxLines % Lines == 0);
    if (at_ == run_end_ && !next_run()) return;
    for (int i = 0; i < Lines; ++i) __builtin_prefetch(at_ + i * kLineBytes, 0, 2);
    at_ += Lines * kLineBytes;
  }

 private:
  static constexpr int kMaxLines = 4, kLineBytes = 64;

  // Keys and values of a whole block are contiguous; of one that is cut at either end only the keys
  // are.
  bool next_run() {
    if (token_ >= end_) return false;
    const int block_end = kv_->block_end(token_);
    const bool whole = !only_keys_ && token_ % kv_->block_size == 0 && block_end <= kv_->end_token;
    const int run_end = block_end < kv_->end_token ? block_end : kv_->end_token;
    const int64_t bytes =
        int64_t{run_end - token_} * kv_->head_size * kv_->element_bytes * (whole ? 2 : 1);
    at_ = static_cast<const char*>(kv_->key_group(token_));
    run_end_ = at_ + bytes / (kMaxLines * kLineBytes) * (kMaxLines * kLineBytes);
    token_ = run_end;
    return at_ != run_end_;
  }

  const KvRow* kv_ = nullptr;
  int token_ = 0, end_ = 0;
  bool only_keys_ = false;
  const char* at_ = nullptr;
  const char* run_end_ = nullptr;
};

}  // namespace
}  // namespace relay

// SPDX-License-Identifier: Apache-2.0
// One segment of one kv head, packed in a thread's cache. Tokens that requests read from the same
// place are packed once for all of them.
#pragma once

#include "kv_row.h"
#include "pack_tile.h"
#include "unpacked.h"

namespace relay {
namespace {

template <class T>
class PackedSegment {
 public:
  // Bytes of memory, a multiple of 64, for segments of `head_size`.
  static int64_t bytes(int head_size) {
    return kTokenBytes + 2 * int64_t{kSegmentTokens} * head_size * int64_t{sizeof(T)};
  }

  PackedSegment(const Unpacked& unpacked, int num_kv_heads, int head_size, void* memory)
      : unpacked_(unpacked),
        num_kv_heads_(num_kv_heads),
        head_size_(head_size),
        keys_(static_cast<const T**>(memory)),
        values_(keys_ + kSegmentTokens),
        block_(reinterpret_cast<T*>(static_cast<char*>(memory) + kTokenBytes)) {}

  // Memory that was read before may hold something else now.
  void forget() {
    std::memset(keys_, 0, kTokenBytes);
    request_ = segment_ = -1;
  }

  // Packs what a request reads of a segment; the rest of its first and last tile is zeros.
  void pack(int request, int segment, int kv_head) {
    if (request == request_ && segment == segment_) return;
    request_ = request;
    segment_ = segment;
    const UnpackedRequest& r = unpacked_.requests[request];
    const int first = segment * kSegmentTokens, last = first + kSegmentTokens;
    const int begin = r.begin_token > first ? r.begin_token : first;
    const int end = r.end_token < last ? r.end_token : last;
    int run = r.first_run;
    for (int tile = begin / kTileTokens * kTileTokens; tile < end; tile += kTileTokens) {
      const T *keys[kTileTokens], *values[kTileTokens];
      for (int i = 0; i < kTileTokens; ++i) {
        const int token = tile + i;
        keys[i] = values[i] = reinterpret_cast<const T*>(kZeros);
        if (token < begin || token >= end) continue;
        while (unpacked_.runs[run].end_token <= token) ++run;
        const KvAddress& address = unpacked_.addresses[int64_t{run} * num_kv_heads_ + kv_head];
        const int64_t offset = int64_t{token - unpacked_.runs[run].begin_token} * head_size_;
        keys[i] = static_cast<const T*>(address.keys) + offset;
        values[i] = static_cast<const T*>(address.values) + offset;
      }
      const int at = tile - first;
      if (std::memcmp(keys, keys_ + at, sizeof keys) == 0 &&
          std::memcmp(values, values_ + at, sizeof values) == 0)
        continue;
      std::memcpy(keys_ + at, keys, sizeof keys);
      std::memcpy(values_ + at, values, sizeof values);
      for (int i = 0; i < kTileTokens; ++i) {
        prefetch_ahead(keys[i]);
        prefetch_ahead(values[i]);
      }
      pack_tile(keys, values, head_size_, kSegmentTokens, at, block_);
    }
  }

  // What was packed, up to `end_token`.
  KvRow kv(int end_token) const {
    return {reinterpret_cast<const char*>(block_),
            0,
            nullptr,
            kSegmentTokens,
            head_size_,
            int{sizeof(T)},
            end_token};
  }

 private:
  // Asks for what is probably packed two tiles later: rows mostly lie one after the other, and
  // machines prefetch no further than a page of memory.
  RELAY_INLINE void prefetch_ahead(const T* row) const {
    const char* at = reinterpret_cast<const char*>(row + 2 * kTileTokens * head_size_);
    for (int byte = 0; byte < head_size_ * int(sizeof(T)); byte += 64)
      __builtin_prefetch(at + byte, 0, 2);
  }

  // Where the keys and the values of each token of the segment were read.
  static constexpr int64_t kTokenBytes = 2 * kSegmentTokens * int64_t{sizeof(const T*)};
  alignas(64) static constexpr float kZeros[kMaxHeadSize] = {};

  const Unpacked& unpacked_;
  const int num_kv_heads_, head_size_;
  const T** keys_;
  const T** values_;
  T* block_;
  int request_ = -1, segment_ = -1;
};

}  // namespace
}  // namespace relay

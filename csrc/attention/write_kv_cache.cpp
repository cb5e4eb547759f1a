// SPDX-License-Identifier: Apache-2.0
#include "kernels.h"
#include "scalar.h"

namespace relay {
namespace {

constexpr int kGroup = 16;
// A batch whose copies touch fewer bytes is written before other threads are awake.
constexpr int64_t kMinParallelBytes = 128 << 10;

// Keys: [block_size/16][head_size/pack][16 tokens][pack dims].
template <int kStep, class T>
void write_key(const T* key, int head_size, int64_t offset, T* area) {
  T* to = area + offset / kGroup * kGroup * head_size + offset % kGroup * kStep;
  for (int d = 0; d < head_size; d += kStep)
    std::memcpy(to + int64_t{d} * kGroup, key + d, kStep * sizeof(T));
}

// Values: [head_size/16][block_size/pack][16 dims][pack tokens].
template <int kStep, class T>
void write_value(const T* value, int head_size, int block_size, int64_t offset, T* area) {
  T* to = area + offset / kStep * kStep * kGroup + offset % kStep;
  for (int group = 0; group < head_size / kGroup; ++group) {
    T* line = to + int64_t{group} * block_size * kGroup;
    for (int d = 0; d < kGroup; ++d) line[d * kStep] = value[group * kGroup + d];
  }
}

// The numbers of one head of a token as the cache has them; `room` is for those that are not.
template <class T>
const T* stored(const T* numbers, int /*head_size*/, float /*scale*/, T* /*room*/) {
  return numbers;
}

template <class T>
const Float8* stored(const T* numbers, int head_size, float scale, Float8* room) {
  for (int d = 0; d < head_size; ++d) from_float(to_float(numbers[d]) / scale, room + d);
  return room;
}

template <class T, class Element>
void write_all(const KvWrite& write) {
  const T* key = static_cast<const T*>(write.key);
  const T* value = static_cast<const T*>(write.value);
  Element* cache = static_cast<Element*>(write.kv_cache);
  const int64_t copies = int64_t{write.num_kv_heads} * write.num_tokens;
  // a copy has a few elements in each of many cache lines: one for every packed group of dims of
  // the keys, one for every 16 dims of the values
  const int64_t lines = copies * (write.head_size / kPack<T> + write.head_size / kGroup);
  const bool pays = lines * 64 > kMinParallelBytes;
  // Head after head: neighbouring tokens share cache lines, so one thread should write them.
#pragma omp parallel for schedule(static) num_threads(write.num_threads) if (pays)
  for (int64_t i = 0; i < copies; ++i) {
    const int64_t head = i / write.num_tokens, token = i % write.num_tokens;
    const int64_t slot = write.slots[token];
    if (slot < 0) continue;
    const int64_t offset = slot % write.block_size;
    Element* area =
        cache + slot / write.block_size * write.kv_block_stride + head * write.kv_head_stride;
    Element room[kMaxHeadSize];
    write_key<kPack<T>>(stored(key + token * write.key_token_stride + head * write.key_head_stride,
                               write.head_size, write.k_scale, room),
                        write.head_size, offset, area);
    write_value<kPack<T>>(
        stored(value + token * write.value_token_stride + head * write.value_head_stride,
               write.head_size, write.v_scale, room),
        write.head_size, write.block_size, offset,
        area + int64_t{write.block_size} * write.head_size);
  }
}

template <class T>
void write_all(const KvWrite& write) {
  if (write.is_float8)
    write_all<T, Float8>(write);
  else
    write_all<T, T>(write);
}

}  // namespace

void write_kv_cache(const KvWrite& write) {
  switch (write.dtype) {
    case DType::kFloat32:
      return write_all<float>(write);
    case DType::kFloat16:
      return write_all<Float16>(write);
    case DType::kBFloat16:
      return write_all<BFloat16>(write);
  }
}

}  // namespace relay

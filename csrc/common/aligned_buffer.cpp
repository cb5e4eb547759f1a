// SPDX-License-Identifier: Apache-2.0
#include "aligned_buffer.h"

#include <cstdlib>
#include <new>

namespace relay {

AlignedBuffer::~AlignedBuffer() { std::free(data_); }

void* AlignedBuffer::reserve(std::size_t bytes) {
  if (bytes > bytes_) {
    constexpr std::size_t kAlignment = 64;
    const std::size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    std::free(data_);
    data_ = std::aligned_alloc(kAlignment, rounded);
    bytes_ = data_ ? rounded : 0;
    if (!data_) throw std::bad_alloc();
  }
  return data_;
}

}  // namespace relay

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace relay {

// A growing, 64-byte aligned scratch area; its content does not survive `reserve`.
class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  AlignedBuffer(const AlignedBuffer&) = delete;
  AlignedBuffer& operator=(const AlignedBuffer&) = delete;
  ~AlignedBuffer();

  // Returns at least `bytes` bytes. Throws std::bad_alloc.
  void* reserve(std::size_t bytes);

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace relay

// SPDX-License-Identifier: Apache-2.0
// Eight tile registers of 16 rows x 64 bytes. Tile numbers are template arguments because the
// instructions name their registers. With RELAY_EMULATE_TILES the same functions work on memory:
// slow, but a machine without AMX can then run the kernel that is built on them.
#pragma once

#include "vec16.h"

namespace relay {
namespace {

constexpr int kTileRows = 16;
constexpr int kTileRowBytes = 64;

#if defined(RELAY_EMULATE_TILES)

struct EmulatedTile {
  alignas(64) char rows[kTileRows][kTileRowBytes];
};
thread_local EmulatedTile emulated_tiles[8];

inline void configure_tiles() {}
inline void release_tiles() {}

template <int Tile>
RELAY_INLINE void tile_zero() {
  std::memset(&emulated_tiles[Tile], 0, sizeof(EmulatedTile));
}
template <int Tile>
RELAY_INLINE void tile_load(const void* from, int64_t stride_bytes) {
  for (int r = 0; r < kTileRows; ++r)
    std::memcpy(emulated_tiles[Tile].rows[r], static_cast<const char*>(from) + r * stride_bytes,
                kTileRowBytes);
}
template <int Tile>
RELAY_INLINE void tile_store(void* to, int64_t stride_bytes) {
  for (int r = 0; r < kTileRows; ++r)
    std::memcpy(static_cast<char*>(to) + r * stride_bytes, emulated_tiles[Tile].rows[r],
                kTileRowBytes);
}
// C[m][n] += sum over k of A[m][2k] * B[k][2n] + A[m][2k+1] * B[k][2n+1]
template <int C, int A, int B>
RELAY_INLINE void tile_multiply() {
  for (int m = 0; m < kTileRows; ++m) {
    __m512 sum = _mm512_load_ps(emulated_tiles[C].rows[m]);
    for (int k = 0; k < kTileRows; ++k) {
      int pair;
      std::memcpy(&pair, emulated_tiles[A].rows[m] + 4 * k, sizeof pair);
      sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(pair),
                             (__m512bh)_mm512_load_si512(emulated_tiles[B].rows[k]));
    }
    _mm512_store_ps(emulated_tiles[C].rows[m], sum);
  }
}

#else

inline void configure_tiles() {
  struct {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  for (int tile = 0; tile < 8; ++tile) {
    config.row_bytes[tile] = kTileRowBytes;
    config.rows[tile] = kTileRows;
  }
  __asm__ volatile("ldtilecfg %0" ::"m"(config));
}
inline void release_tiles() { __asm__ volatile("tilerelease" ::: "memory"); }

// The compiler's own intrinsics do not say that a tile load reads memory, and it moves stores of
// weights past them; these do.
template <int Tile>
RELAY_INLINE void tile_zero() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(Tile));
}
template <int Tile>
RELAY_INLINE void tile_load(const void* from, int64_t stride_bytes) {
  __asm__ volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(Tile), "r"(from), "r"(stride_bytes)
                   : "memory");
}
template <int Tile>
RELAY_INLINE void tile_store(void* to, int64_t stride_bytes) {
  __asm__ volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(Tile), "r"(to), "r"(stride_bytes)
                   : "memory");
}
template <int C, int A, int B>
RELAY_INLINE void tile_multiply() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

#endif

}  // namespace
}  // namespace relay

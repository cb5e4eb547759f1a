// SPDX-License-Identifier: Apache-2.0
// Eight tile registers of up to 16 rows x 64 bytes, and what else of bf16 comes with them. The low
// rows have registers 4, which is multiplied, and 0 and 1, which hold its products. Tile numbers
// are template arguments because the instructions name their registers. With RELAY_EMULATE_TILES
// the same functions work on memory: slow, but a machine without AMX can then run the kernel that
// is built on them.
#pragma once

#include "vec16.h"

namespace relay {
namespace {

constexpr int kTileRows = 16;
constexpr int kTileRowBytes = 64;

thread_local int low_rows = 0;  // of registers 0, 1 and 4; the others have kTileRows

constexpr bool is_low(int tile) { return tile == 0 || tile == 1 || tile == 4; }
inline void configure_tiles(int rows);
// What the registers hold is lost when the number changes.
RELAY_INLINE void use_low_rows(int rows) {
  if (rows != low_rows) configure_tiles(rows);
}

#if defined(RELAY_EMULATE_TILES)

struct EmulatedTile {
  alignas(64) char rows[kTileRows][kTileRowBytes];
};
thread_local EmulatedTile emulated_tiles[8];

inline void configure_tiles(int rows) {
  low_rows = rows;
  std::memset(emulated_tiles, 0, sizeof emulated_tiles);
}
inline void release_tiles() {}
inline int rows_of(int tile) { return is_low(tile) ? low_rows : kTileRows; }

template <int Tile>
RELAY_INLINE void tile_zero() {
  std::memset(&emulated_tiles[Tile], 0, sizeof(EmulatedTile));
}
template <int Tile>
RELAY_INLINE void tile_load(const void* from, int64_t stride_bytes) {
  for (int r = 0; r < rows_of(Tile); ++r)
    std::memcpy(emulated_tiles[Tile].rows[r], static_cast<const char*>(from) + r * stride_bytes,
                kTileRowBytes);
}
template <int Tile>
RELAY_INLINE void tile_store(void* to, int64_t stride_bytes) {
  for (int r = 0; r < rows_of(Tile); ++r)
    std::memcpy(static_cast<char*>(to) + r * stride_bytes, emulated_tiles[Tile].rows[r],
                kTileRowBytes);
}
// C[m][n] += (sum over k of A[m][2k] * B[k][2n]) + (sum over k of A[m][2k+1] * B[k][2n+1]), both
// sums from zero on.
template <int C, int A, int B>
RELAY_INLINE void tile_multiply() {
  for (int m = 0; m < rows_of(C); ++m) {
    Vec16 even = zero16(), odd = zero16();
    for (int k = 0; k < kTileRows; ++k) {
      uint32_t pair;
      std::memcpy(&pair, emulated_tiles[A].rows[m] + 4 * k, sizeof pair);
      Vec16 even_line, odd_line;
      load_pairs16(reinterpret_cast<const BFloat16*>(emulated_tiles[B].rows[k]), &even_line,
                   &odd_line);
      even = fma16(set16(bits_float(pair << 16)), even_line, even);
      odd = fma16(set16(bits_float(pair & 0xffff0000u)), odd_line, odd);
    }
    float* row = reinterpret_cast<float*>(emulated_tiles[C].rows[m]);
    store16(row, load16(row) + (even + odd));
  }
}

// 32 numbers, rounded to bf16.
RELAY_INLINE __m512i round_pairs32(Vec16 low, Vec16 high) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(round_to_bf16(low)), round_to_bf16(high), 1);
}
// Adds the two numbers of each pair.
RELAY_INLINE Vec16 add_pairs16(Vec16 sums, __m512i pairs) {
  alignas(64) BFloat16 numbers[2 * kLanes];
  _mm512_store_si512(numbers, pairs);
  Vec16 even, odd;
  load_pairs16(numbers, &even, &odd);
  return sums + odd + even;
}

#else

inline void configure_tiles(int rows) {
  low_rows = rows;
  struct {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  for (int tile = 0; tile < 8; ++tile) {
    config.row_bytes[tile] = kTileRowBytes;
    config.rows[tile] = static_cast<uint8_t>(is_low(tile) ? rows : kTileRows);
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

RELAY_INLINE __m512i round_pairs32(Vec16 low, Vec16 high) {
  return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}
RELAY_INLINE Vec16 add_pairs16(Vec16 sums, __m512i pairs) {
  return _mm512_dpbf16_ps(sums, (__m512bh)pairs, (__m512bh)_mm512_set1_epi16(0x3f80));
}

#endif

}  // namespace
}  // namespace relay

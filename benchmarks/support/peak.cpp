// SPDX-License-Identifier: Apache-2.0
// What this machine can do at best, so that results can be read as fractions of it. Prints one JSON
// object. Usage: peak [threads]
//
// Rates are the best of several short runs, on `threads` threads at once.
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#if defined(__AVX512F__) || defined(__AMX_BF16__)
#include <immintrin.h>
#endif
#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int kRuns = 5;

// Floats of a register, and independent sums, which hide the latency of an instruction.
#if defined(__AVX512F__)
constexpr int kLanes = 16, kChains = 24;
#elif defined(__AVX__)
constexpr int kLanes = 8, kChains = 12;
#else
constexpr int kLanes = 4, kChains = 12;
#endif

typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));

double now_s() {
  using Clock = std::chrono::steady_clock;
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

// Keeps threads apart: the scheduler may leave two on one core for as long as a run takes.
void bind_to_own_core(int thread) {
  static const cpu_set_t allowed = [] {
    cpu_set_t set;
    sched_getaffinity(0, sizeof(set), &set);
    return set;
  }();
  for (int core = 0, seen = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &allowed) || seen++ != thread) continue;
    cpu_set_t own;
    CPU_ZERO(&own);
    CPU_SET(core, &own);
    sched_setaffinity(0, sizeof(own), &own);
    return;
  }
}

// Calls work(thread) on every thread at once; returns the best wall time over kRuns.
template <class Work>
double best_s(int threads, const Work& work) {
  double best = 1e300;
  for (int run = 0; run < kRuns; ++run) {
    std::atomic<int> bound{0};
    std::atomic<bool> begun{false};
    std::vector<std::thread> others;
    for (int t = 1; t < threads; ++t) {
      others.emplace_back([&, t] {
        bind_to_own_core(t);
        ++bound;
        while (!begun) std::this_thread::yield();
        work(t);
      });
    }
    if (threads > 1) bind_to_own_core(0);
    while (bound < threads - 1) std::this_thread::yield();
    const double begin = now_s();
    begun = true;
    work(0);
    for (std::thread& other : others) other.join();
    best = std::min(best, now_s() - begin);
  }
  return best;
}

double fp32_flops(int threads) {
  constexpr int64_t kSteps = 2000000;
  const double seconds = best_s(threads, [](int) {
    Vector sums[kChains] = {};
    Vector factor = sums[0] + 0.5f, addend = sums[0] + 1.0f;
    asm volatile("" : "+m"(factor), "+m"(addend));
    for (int64_t step = 0; step < kSteps; ++step)
#pragma GCC unroll 24
      for (int chain = 0; chain < kChains; ++chain) sums[chain] = sums[chain] * factor + addend;
    for (Vector& sum : sums) asm volatile("" : "+m"(sum));
  });
  return 2.0 * kLanes * kChains * kSteps * threads / seconds;
}

#ifdef __AVX512BF16__
double avx512_bf16_flops(int threads) {
  constexpr int64_t kSteps = 2000000;
  const double seconds = best_s(threads, [](int) {
    __m512 sums[kChains];
    for (__m512& sum : sums) sum = _mm512_setzero_ps();
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    for (int64_t step = 0; step < kSteps; ++step)
#pragma GCC unroll 24
      for (int chain = 0; chain < kChains; ++chain)
        sums[chain] = _mm512_dpbf16_ps(sums[chain], ones, ones);
    for (__m512& sum : sums) asm volatile("" : "+m"(sum));
  });
  return 4.0 * kLanes * kChains * kSteps * threads / seconds;
}
#endif

#ifdef __AMX_BF16__
bool ask_for_amx() {
  constexpr int kArchReqXcompPerm = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kTileData) == 0;
}

double amx_bf16_flops(int threads) {
  constexpr int64_t kSteps = 1000000;
  const double seconds = best_s(threads, [](int) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } tiles;
    for (int tile = 0; tile < 8; ++tile) tiles.row_bytes[tile] = 64, tiles.rows[tile] = 16;
    // GCC takes it to read eight bytes only
    asm volatile("" : : "m"(tiles));
    _tile_loadconfig(&tiles);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
    for (int64_t step = 0; step < kSteps; ++step) {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
  });
  return 4.0 * (2.0 * 16 * 16 * 32) * kSteps * threads / seconds;
}
#endif

// Reads `bytes` per thread again and again. The caller's memory is touched by its reader first.
double read_bytes_per_s(int threads, int64_t bytes) {
  const int64_t passes = std::max<int64_t>(1, (int64_t{256} << 20) / bytes);
  std::vector<Vector*> memory(threads);
  const int64_t vectors = bytes / int64_t{sizeof(Vector)};
  for (Vector*& part : memory) {
    part = static_cast<Vector*>(std::aligned_alloc(4096, bytes));
    std::fill(part, part + vectors, Vector{});
  }
  const double seconds = best_s(threads, [&](int thread) {
    Vector sums[8] = {};
    for (int64_t pass = 0; pass < passes; ++pass) {
      const Vector* at = memory[thread];
      for (int64_t i = 0; i + 8 <= vectors; i += 8)
#pragma GCC unroll 8
        for (int k = 0; k < 8; ++k) sums[k] += at[i + k];
      asm volatile("" : : "r"(at) : "memory");
    }
    for (Vector& sum : sums) asm volatile("" : "+m"(sum));
  });
  for (Vector* part : memory) std::free(part);
  return double(bytes) * passes * threads / seconds;
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 1;
  std::printf("{\"threads\": %d", threads);
  std::printf(", \"fp32_gflops\": %.1f", fp32_flops(threads) / 1e9);
#ifdef __AVX512BF16__
  std::printf(", \"avx512_bf16_gflops\": %.1f", avx512_bf16_flops(threads) / 1e9);
#endif
#ifdef __AMX_BF16__
  if (ask_for_amx()) std::printf(", \"amx_bf16_gflops\": %.1f", amx_bf16_flops(threads) / 1e9);
#endif
  std::printf(", \"read_512_kib_gb_per_s\": %.1f", read_bytes_per_s(threads, 512 << 10) / 1e9);
  std::printf(", \"read_4_mib_gb_per_s\": %.1f", read_bytes_per_s(threads, 4 << 20) / 1e9);
  std::printf(", \"read_256_mib_gb_per_s\": %.1f}\n",
              read_bytes_per_s(threads, int64_t{256} << 20) / 1e9);
}

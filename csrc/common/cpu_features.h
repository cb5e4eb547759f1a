// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace relay {

struct CpuFeatures {
  bool avx2 = false;         // with FMA and F16C, and the operating system saves the registers
  bool avx512 = false;       // F, BW, VL, DQ, and the operating system saves the registers
  bool avx512_vnni = false;  // vpdpbusd
  bool avx512_bf16 = false;  // vdpbf16ps
  // Sapphire Rapids and later: half as many products a second as with float32.
  bool avx512_bf16_is_slow = false;
  bool amx_bf16 = false;           // tile registers, bf16 products, and permission to use them
  bool sse42 = false;              // with PCLMULQDQ
  bool avx512_vpclmulqdq = false;  // with both of the above
  bool neon = false;               // every aarch64 CPU
  bool neon_bf16 = false;          // bfdot
};

// Asked once; asking for AMX also requests the process's permission to use tile registers.
const CpuFeatures& cpu_features();

}  // namespace relay

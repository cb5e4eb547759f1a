// SPDX-License-Identifier: Apache-2.0
#pragma once

#define RELAY_INLINE __attribute__((always_inline)) inline

namespace relay {
namespace {

constexpr int kLanes = 16;
constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kLn2 = 0.69314718055994530942f;

// 2^f for f in [0, 1) as 1 + f * (c1 + ... c5 f^4): relative error 8.3e-8, exact at 0.
constexpr float kExp2[5] = {0x1.62e4bap-1f, 0x1.ebdb56p-3f, 0x1.c91ce6p-5f, 0x1.277856p-7f,
                            0x1.e974fap-10f};
// The same with fewer terms: relative error 8.6e-5, exact at 0.
constexpr float kExp2Roughly[3] = {0x1.63e65ap-1f, 0x1.d23788p-3f, 0x1.3baaaap-4f};

}  // namespace
}  // namespace relay

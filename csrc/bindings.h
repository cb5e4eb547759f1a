// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

// What each room adds to vllm_relay._C.
void bind_storage(nanobind::module_& module);

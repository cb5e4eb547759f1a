// SPDX-License-Identifier: Apache-2.0
// The bindings*.cpp are the only files that know Python; each adds its room's functions.
#pragma once

#include <nanobind/nanobind.h>

void bind_block_order(nanobind::module_& module);
void bind_host_attention(nanobind::module_& module);
void bind_index(nanobind::module_& module);
void bind_storage(nanobind::module_& module);

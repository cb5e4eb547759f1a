# SPDX-License-Identifier: Apache-2.0
"""bench_op as CPUs without AVX-512 run it: relay's kernel `avx2` against CPU_ATTN's AVX2 library.

On a CPU that has AVX-512 or AMX too, vLLM and relay are told that it has neither.
"""

import os
import sys
from importlib import import_module

import torch

from vllm_relay import _C


def main() -> None:
    if "vllm._custom_ops" in sys.modules:  # vLLM has chosen its library: begin anew
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    newer = ("avx512", "amx")
    kernels = [name for name in _C.supported_kernels() if not name.startswith(newer)]
    if kernels[0] != "avx2":
        raise SystemExit("this CPU has no AVX2: nothing to measure")
    _C.supported_kernels = lambda: kernels
    # read when vLLM is imported, which bench_op does
    torch.cpu._is_avx512_supported = torch.cpu._is_amx_tile_supported = lambda: False
    import_module("benchmarks.attention.bench_op").main(__file__, __doc__)


if __name__ == "__main__":
    main()

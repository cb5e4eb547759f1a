# SPDX-License-Identifier: Apache-2.0
"""engine_main.py with the backends for CUDA: their Triton kernels run in Triton's interpreter, on
the CPU tensors of vLLM's CPU build, and copies to the host arrive when somebody waits for them. In
one process: a spawned one would select the CPU backends again.

Usage: python -m tests.integration.triton_main OUTPUT.json ENGINE_ARGS.json SCENARIO...
"""

from __future__ import annotations

import importlib
import os


def main() -> None:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
    importlib.import_module("tests.attention_backends.triton_interpreter")  # mends it

    from vllm_relay import plugin

    plugin.CPU_BACKEND_PATH = plugin.CUDA_BACKEND_PATH
    plugin.SPARSE_BACKEND_PATH = plugin.SPARSE_CUDA_BACKEND_PATH

    from tests.attention_backends.fake_device import DelayedCopies
    from tests.integration import engine_main
    from vllm_relay.attention_backends.cuda import relay as relay_cuda
    from vllm_relay.attention_backends.sparse import cuda as sparse_cuda

    sparse_cuda.make_copies = DelayedCopies
    relay_cuda.TOTALS_EVERY_STEPS = 1  # these runs are short
    engine_main.main()


if __name__ == "__main__":
    main()

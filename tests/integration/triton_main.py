# SPDX-License-Identifier: Apache-2.0
"""engine_main.py with the backend for CUDA: its Triton kernels run in Triton's interpreter, on the
CPU tensors of vLLM's CPU build. In one process: a spawned one would select the CPU backend again.

Usage: python -m tests.integration.triton_main OUTPUT.json ENGINE_ARGS.json SCENARIO...
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

from tests.attention_backends import triton_interpreter  # noqa: E402, F401
from vllm_relay import plugin  # noqa: E402

plugin.CPU_BACKEND_PATH = plugin.CUDA_BACKEND_PATH

from tests.integration import engine_main  # noqa: E402


def main() -> None:
    from vllm_relay.attention_backends import relay_cuda

    relay_cuda.TOTALS_EVERY_STEPS = 1  # these runs are short
    engine_main.main()


if __name__ == "__main__":
    main()

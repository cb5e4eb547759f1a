# SPDX-License-Identifier: Apache-2.0
"""logits_main.py or engine_main.py with model runner V2, the backend for CUDA, or both.

The Triton kernels of V2 and of the backend run in Triton's interpreter, on the CPU tensors of
vLLM's CPU build. In one process: a spawned one would select the CPU backend again.

python -m tests.modules.variant_main RUNNER BACKEND MAIN ARGUMENT...
"""

from __future__ import annotations

import importlib
import os
import sys
import types


def main(runner: str, backend: str, name: str, *arguments: str) -> None:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(runner == "v2"))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from triton import backends

    # what vLLM looks for before it takes Triton on CPUs for usable
    driver = types.SimpleNamespace(is_active=lambda: True)
    if runner == "v2":
        backends.backends["cpu"] = types.SimpleNamespace(driver=driver)
    interpreter = importlib.import_module("tests.attention_backends.triton_interpreter")  # mends it
    if runner == "v2":  # its kernels follow pointers that they load
        interpreter._Memory.check = lambda *arguments: None

    from vllm_relay import plugin

    if backend == "cuda":
        plugin.CPU_BACKEND_PATH = "tests.modules.stock_backend.StockedBackend"

    importlib.import_module(f"tests.modules.{name}").main(*arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])

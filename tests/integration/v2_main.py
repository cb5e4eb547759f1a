# SPDX-License-Identifier: Apache-2.0
"""Another driver with model runner V2, whose own Triton kernels run in the interpreter, too.

Usage: python -m tests.integration.v2_main DRIVER OUTPUT.json ENGINE_ARGS.json SCENARIO...
"""

from __future__ import annotations

import importlib
import os
import sys
import types


def main() -> None:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    from triton import backends

    # what vLLM looks for before it takes Triton on CPUs for usable
    driver = types.SimpleNamespace(is_active=lambda: True)
    backends.backends["cpu"] = types.SimpleNamespace(driver=driver)
    interpreter = importlib.import_module("tests.attention_backends.triton_interpreter")
    interpreter._Memory.check = lambda *arguments: None  # V2 follows pointers that it loads

    importlib.import_module(f"tests.integration.{sys.argv.pop(1)}").main()


if __name__ == "__main__":
    main()

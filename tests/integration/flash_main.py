# SPDX-License-Identifier: Apache-2.0
"""engine_main.py with RELAY beside FlashAttention, which a twin in torch stands for; the Triton
kernels run in Triton's interpreter. In one process: a spawned one would select the CPU backends.

Usage: python -m tests.integration.flash_main OUTPUT.json ENGINE_ARGS.json SCENARIO...
"""

from __future__ import annotations

import importlib
import os


def main(twin: str = "flash_twin", backend: str = "relay.RelayNodesBackend") -> None:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
    importlib.import_module("tests.attention_backends.triton_interpreter")  # mends it

    from tests.integration import engine_main
    from vllm_relay import plugin
    from vllm_relay.attention_backends.cuda.flash import node_plans

    importlib.import_module(f"tests.attention_backends.{twin}").stand_in()
    node_plans.CALL_BYTES = 0  # what tiny models share pays too
    plugin.CPU_BACKEND_PATH = f"vllm_relay.attention_backends.cuda.flash.{backend}"
    engine_main.main()


if __name__ == "__main__":
    main()

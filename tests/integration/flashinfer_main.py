# SPDX-License-Identifier: Apache-2.0
"""engine_main.py with RELAY beside FlashInfer, as flash_main.py beside FlashAttention.

Usage: python -m tests.integration.flashinfer_main OUTPUT.json ENGINE_ARGS.json SCENARIO...
"""

from __future__ import annotations

from tests.integration import flash_main


def main() -> None:
    flash_main.main("flashinfer_twin", "relay_flashinfer.RelayFlashInferBackend")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels on a GPU: `python -m benchmarks.cuda` checks them, then times them.

Needs torch, Triton and numpy, and this checkout; neither vLLM nor the compiled extension.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

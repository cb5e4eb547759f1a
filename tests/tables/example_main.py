# SPDX-License-Identifier: Apache-2.0
"""An example with a model that starts in seconds.

python -m tests.tables.example_main EXAMPLE MODEL
"""

from __future__ import annotations

import functools
import runpy
import sys

import vllm_relay.tables

if __name__ == "__main__":
    vllm_relay.tables.open_engine = functools.partial(
        vllm_relay.tables.open_engine, enforce_eager=True, max_num_seqs=8, dtype="float32"
    )
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")

# SPDX-License-Identifier: Apache-2.0
"""An example as it is, with engines that start in seconds and need little memory.

python -m tests.examples.example_main EXAMPLE [ARGUMENTS]
"""

from __future__ import annotations

import functools
import runpy
import sys

import vllm

import vllm_relay.tables

_QUICK = {"enforce_eager": True, "dtype": "float32", "max_model_len": 4096, "max_num_seqs": 16}

if __name__ == "__main__":
    vllm.LLM = functools.partial(vllm.LLM, **_QUICK)
    open_engine = vllm_relay.tables.open_engine
    vllm_relay.tables.open_engine = functools.partial(open_engine, **_QUICK)
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")

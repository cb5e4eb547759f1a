# SPDX-License-Identifier: Apache-2.0
"""A benchmark in a process that has vLLM already, and so have those of its engines: nothing that is
timed here counts.

Usage: python -m benchmarks.smoke_main MODULE ARGUMENT...
"""

import sys

from tests.support import vllm_processes
from vllm_relay.demo import engine_process
from vllm_relay.tables.engines import in_process

if __name__ == "__main__":
    sys.orig_argv = [sys.executable, "-m", *sys.argv[1:]]  # some start themselves anew
    in_process._LEAST_MEASURED_S = 0.0
    engine_process.subprocess = vllm_processes.WARM_SUBPROCESS
    vllm_processes.run_main(*sys.argv[1:])

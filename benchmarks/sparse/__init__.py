# SPDX-License-Identifier: Apache-2.0
"""Key indexes and sparse attention, measured on heads that models have or could have."""

import os

# read when a rival's BLAS is loaded: CPU time is that of one thread
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# SPDX-License-Identifier: Apache-2.0
"""One workload per file; `python -m benchmarks.run_all` runs them all."""

# SPDX-License-Identifier: Apache-2.0
"""What this GPU does at best, against which limits are computed."""

from benchmarks.cuda.run import Run
from benchmarks.cuda.variants import Variant


def variants(run: Run) -> list[Variant]:
    return []


def measure(run: Run) -> None:
    ceilings = run.ceilings
    run.result.add_table(
        "Ceilings",
        [
            {
                "copy TB/s": ceilings.bytes_per_s / 1e12,
                "bf16 matrix TFLOP/s": ceilings.flops_per_s / 1e12,
                "FLOP per byte where both bind": ceilings.flops_per_s / ceilings.bytes_per_s,
            }
        ],
        "A copy of 1 GiB, reads and writes counted, and an 8192 x 8192 x 8192 product, of random "
        "numbers.",
    )

# SPDX-License-Identifier: Apache-2.0
"""Checks the Triton kernels on a GPU, then times them; in all it takes less than eight minutes.

Both files are written after every part, so that a run that is cut short leaves what it found.
"""

import argparse
import os
import time
from pathlib import Path

from benchmarks.cuda import parts


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser("python -m benchmarks.cuda", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="and here, to be read")
    parser.add_argument(
        "--only", default="", metavar="PART,PART", help=f"of {', '.join(parts.NAMES)}"
    )
    parser.add_argument("--quick", action="store_true", help="fewer cases of everything")
    parser.add_argument(
        "--interpret", action="store_true",
        help="tiny shapes on the CPU under Triton's interpreter, to see that everything runs",
    )  # fmt: skip
    parser.add_argument(
        "--total-s", type=float, default=parts.TOTAL_S, help="for everything (%(default)s)"
    )
    parser.add_argument(
        "--unified-attention", metavar="PATH", help="vLLM's triton_unified_attention.py, a rival"
    )
    parser.add_argument("--fa3", metavar="PATH", help="vLLM's _vllm_fa3_C.abi3.so, a rival")
    parser.add_argument("--continue", dest="continues", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        parts.chosen(options.only)
    except ValueError as error:
        parser.error(str(error))
    if options.continues and options.json is None:
        parser.error("--continue reads the result so far from --json")
    return options


def main() -> int:
    options = parse()
    options.began_unix_s = time.time()
    if options.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # read by triton when it is imported
    from benchmarks.cuda import runner

    return runner.main(options)


if __name__ == "__main__":
    raise SystemExit(main())

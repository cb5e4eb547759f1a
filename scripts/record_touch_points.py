# SPDX-License-Identifier: Apache-2.0
"""What a vLLM has differently from the table of touch points; with --record it goes there.

usage: python scripts/record_touch_points.py [--vllm FOLDER] [--record]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from touch_points.recording import OURS, needed, record, release_of

from vllm_relay.vllm_changes.contract.python_sources import installed_vllm
from vllm_relay.vllm_changes.contract.table import PATH, TouchPointTable


def main() -> int:
    parser = argparse.ArgumentParser(
        description="What of a vLLM differs from the table of touch points.",
    )
    parser.add_argument("--vllm", type=Path, help="folder of the package; default: the installed")
    parser.add_argument("--record", action="store_true", help="write it to the table")
    arguments = parser.parse_args()
    folder = arguments.vllm or installed_vllm()
    if folder is None or not (folder / "__init__.py").is_file():
        print(f"no vLLM in {folder}: give the folder that has its __init__.py", file=sys.stderr)
        return 2
    release = release_of(folder)
    table = TouchPointTable.load() if PATH.exists() else TouchPointTable((), ())
    if table.releases:
        found = table.compare(folder, release)
        for difference in found.differences:
            print(difference)
        print(
            f"vLLM {release}: {len(found.differences)} of {found.num_points} touch points differ "
            f"from vLLM {found.release}"
        )
    result = needed(folder, OURS)
    for path, files in sorted(result.unknown.items()):
        print(f"{path}: vLLM {release} has no such attribute; read by {', '.join(sorted(files))}")
    if arguments.record:
        record(table, result, folder, release).save()
        print(f"recorded vLLM {release} in {PATH}")
    return 1 if result.unknown else 0


if __name__ == "__main__":
    sys.exit(main())

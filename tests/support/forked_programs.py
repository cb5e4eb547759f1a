# SPDX-License-Identifier: Apache-2.0
"""Programs in processes of their own, that are forks of one with what all of them import."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

_RUN_EACH = """
import json, os, sys, traceback
{imports}
for program in json.load(sys.stdin):
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        os.dup2(2, 1)  # what is logged
        sys.stdout = os.fdopen(write_end, "w")
        try:
            exec(program)
        except BaseException:
            traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
        os._exit(0)
    os.close(write_end)
    with open(read_end) as pipe:
        print(json.dumps(pipe.read().splitlines()))
    os.wait()
"""


def lines_of_each(imports: str, programs: Sequence[str]) -> list[list[str]]:
    """What each program prints, with its traceback where it fails."""
    done = subprocess.run(
        [sys.executable, "-c", _RUN_EACH.format(imports=imports)],
        input=json.dumps(programs),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return list(map(json.loads, done.stdout.splitlines()[-len(programs) :]))

# SPDX-License-Identifier: Apache-2.0
"""Code that objects for several CPUs share runs on the least of them."""

import platform
import re
import shutil
import subprocess

import pytest

from vllm_relay import _C

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86-64"),
    pytest.mark.skipif(shutil.which("objdump") is None, reason="binutils are not installed"),
]


def output(*command):
    return subprocess.run(
        [*command, _C.__file__], capture_output=True, text=True, check=True
    ).stdout


def test_functions_that_linkers_merge_are_for_every_cpu():
    merged = {
        line.split()[-1]
        for line in output("nm", "--defined-only").splitlines()
        if line.split()[-2] in "WVu"
    }
    found = {}
    name = ""
    for line in output("objdump", "-d", "--no-show-raw-insn").splitlines():
        start = re.match(r"[0-9a-f]+ <(.+)>:$", line)
        if start:
            name = start[1]
        elif name in merged and re.search(r"%[yz]mm|\{%k\d\}|%tmm", line):
            found.setdefault(name, line.strip())
    assert len(merged) > 5
    assert found == {}

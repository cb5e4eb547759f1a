# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from vllm.v1.attention.backends import fa_utils

from tests.support.refusals import ended
from vllm_relay import tune
from vllm_relay.attention_backends.cuda import config as gpu_config
from vllm_relay.attention_backends.cuda import tune as gpu_tune
from vllm_relay.attention_backends.cuda.config import KernelConfig
from vllm_relay.attention_backends.cuda.flash import tune as flash_tune

OPTIONS = {
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_size": 32,
    "dtype": "bfloat16",
    "kv_dtype": None,
    "block_size": 16,
    "folder": None,
}


def run(**changes: Any) -> tuple[int, str]:
    text = io.StringIO()
    console = Console(file=text, width=200)
    status, refusal = ended(lambda: tune.run_tune(**{**OPTIONS, **changes}, console=console))
    return status, refusal or text.getvalue()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float32"}, "--dtype: given 'float32', expected bfloat16 or float16"),
        ({"kv_dtype": "int8"}, "--kv-dtype: given 'int8', expected bfloat16, float16, fp8"),
        ({"head_size": 33}, "--head-size: given 33, expected 32 to 256 in steps of 16"),
        ({"num_heads": 5}, "--heads: given 5, expected a multiple of --kv-heads, 2"),
        ({"block_size": 24}, "--block-size: given 24, expected a multiple of 16"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    status, text = run(**changes)
    assert status == 2 and message in text


def test_there_has_to_be_a_gpu() -> None:
    status, text = run()
    assert status == 1 and "no CUDA GPU was found" in text


def test_what_is_fastest_is_stored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiny = KernelConfig(
        tile_tokens=16, segment_tokens=32, section_tokens=64, small_rows=16, large_rows=16
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(gpu_tune, "LOADS", (gpu_tune.Load(2, 1, 32, 10),))
    monkeypatch.setattr(gpu_tune, "candidates", lambda *args: [tiny])
    bench_cls = gpu_tune.Bench
    monkeypatch.setattr(
        gpu_tune, "Bench", lambda shape, device, loads: bench_cls(shape, "cpu", loads)
    )
    monkeypatch.setattr(bench_cls, "time_us", lambda self, run: 1.0)
    monkeypatch.setattr(gpu_tune, "with_costs", lambda bench, config: config)
    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", object(), raising=False)
    monkeypatch.setattr(fa_utils, "get_flash_attn_version", lambda **shape: 2)

    def compared(bench: Any, planner: Any, flash_attention: Any, fa_version: int) -> Any:
        assert fa_version == 2
        return [flash_tune.Compared(bench.loads[0], 3.0, 2.0, 4.0)]

    monkeypatch.setattr(flash_tune, "compare", compared)
    status, text = run(folder=tmp_path)
    assert status == 0 and "a-gpu.json" in text and "2 in 1 x 32" in text
    assert "faster: triton" in text
    assert f"VLLM_RELAY_CACHE={tmp_path}" in text
    (tmp_path / "file").write_text("")
    for changes, message in (
        ({"folder": tmp_path / "file"}, "file"),
        ({"kv_dtype": "fp8", "capability": (8, 6)}, "only from 8.9 on"),
        ({"capability": (7, 5)}, "only from 8.0 on"),
    ):
        capability = changes.pop("capability", (9, 0))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda c=capability: c)
        status, text = run(**{"folder": tmp_path, **changes})
        assert status == (2 if message == "file" else 1) and message in text
    monkeypatch.setenv("VLLM_RELAY_CACHE", str(tmp_path))
    shape = {"head_size": 32, "kv_bytes": 2}
    assert gpu_config.config_for("A GPU", (9, 0), **shape) == tiny
    assert gpu_config.faster_kernels("A GPU", **shape) == "triton"
    assert gpu_config.faster_kernels("Another", **shape) is None
    monkeypatch.setattr(flash_tune, "compare", lambda *args, **keywords: 1 / 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert run(folder=tmp_path, kv_dtype="fp8")[0] == 0

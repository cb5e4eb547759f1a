# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from vllm_relay.attention_backends.cuda.config import (
    SHIPPED,
    KernelConfig,
    config_for,
    config_key,
    read_tuned,
    tuned_folder,
    tuned_path,
    write_tuned,
)

TUNED = KernelConfig(tile_tokens=128, num_warps=4, state_cost=0.5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"segment_tokens": 96}, "a segment whole tiles: got 4096, 96 and 64"),
        ({"section_tokens": 4000}, "must be whole segments.* got 4000, 512 and 64"),
        ({"tile_tokens": 0}, "tile_tokens is 0, expected a power of two"),
        ({"tile_tokens": 48, "segment_tokens": 96}, "tile_tokens is 48, expected a power of two"),
        ({"tile_tokens": 8}, "tile_tokens is 8"),
        ({"small_rows": 24}, "small_rows is 24"),
        ({"large_rows": 96}, "large_rows is 96"),
        ({"num_warps": 3}, "num_warps is 3"),
        ({"tile_tokens": "64"}, "tile_tokens is '64'"),
        ({"segment_tokens": 0}, "segment_tokens is 0"),
        ({"section_tokens": -512}, "section_tokens is -512"),
        ({"programs_per_sm": 0}, "programs_per_sm is 0"),
        ({"num_stages": 1.5}, "num_stages is 1.5, expected a whole number from 1"),
        ({"num_stages": True}, "num_stages is True"),
        ({"state_cost": -1}, "state_cost is -1, expected a number from 0"),
        ({"start_tokens": float("nan")}, "start_tokens is nan"),
        ({"large_rows": 32}, "large_rows is 32, expected at least small_rows, 64"),
    ],
    ids=str,
)
def test_sizes_that_cannot_be(fields, message):
    with pytest.raises(ValueError, match=message):
        KernelConfig(**fields)


@pytest.mark.parametrize(
    ("head_size", "itemsize", "tile_tokens", "rows"),
    [
        (64, 2, 64, (64, 128)),
        (128, 2, 64, (64, 128)),
        (80, 4, 32, (64, 64)),
        (160, 2, 32, (64, 64)),
        (256, 4, 16, (32, 32)),
        (256, 1, 64, (64, 64)),
        (4096, 4, 16, (16, 16)),
    ],
)
def test_large_heads_take_small_tiles(head_size, itemsize, tile_tokens, rows):
    config = KernelConfig(tile_tokens=64, small_rows=64, large_rows=128)
    fits = config.for_head_size(head_size, itemsize)
    assert fits.tile_tokens == tile_tokens and (fits.small_rows, fits.large_rows) == rows
    assert fits.for_head_size(head_size, itemsize) == fits


@pytest.mark.parametrize(
    ("capability", "shipped"),
    [
        ((7, 5), 80),
        ((8, 0), 80),
        ((8, 9), 86),
        ((9, 0), 90),
        ((10, 3), 100),
        ((12, 0), 120),
        ((13, 0), 120),
    ],
)
def test_newest_configuration_that_is_not_newer_than_the_gpu(
    monkeypatch, tmp_path, capability, shipped
):
    monkeypatch.setenv("VLLM_RELAY_CACHE", str(tmp_path))
    config = config_for("some GPU", capability, head_size=128, kv_bytes=2)
    assert config == SHIPPED[shipped]
    in_fp8 = config_for("some GPU", capability, head_size=128, kv_bytes=1)
    assert in_fp8.small_rows == in_fp8.large_rows == config.large_rows


@pytest.mark.parametrize(
    ("head_size", "key"),
    [
        (64, "head_size 64, 2 bytes"),
        (65, "head_size 128, 2 bytes"),
        (80, "head_size 128, 2 bytes"),
        (128, "head_size 128, 2 bytes"),
        (256, "head_size 256, 2 bytes"),
    ],
)
def test_keys_name_padded_heads(head_size, key):
    assert config_key(head_size, 2) == key


def test_folder_is_given_or_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_RELAY_CACHE", str(tmp_path / "given"))
    assert tuned_folder() == tmp_path / "given"
    monkeypatch.delenv("VLLM_RELAY_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert tuned_folder() == tmp_path / "cache" / "vllm_relay"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tuned_folder() == tmp_path / ".cache" / "vllm_relay"
    assert tuned_path("NVIDIA H200 (141GB)").name == "nvidia-h200-141gb.json"


def test_what_was_measured_is_read_back(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_RELAY_CACHE", str(tmp_path / "new"))
    path = tuned_path("NVIDIA H200")
    write_tuned(path, {config_key(80, 2): TUNED}, {"gpu": "NVIDIA H200", "triton": "3.9.0"})
    assert read_tuned(path).configs == {"head_size 128, 2 bytes": TUNED}
    assert json.loads(path.read_text())["triton"] == "3.9.0"
    assert [file.name for file in path.parent.iterdir()] == ["nvidia-h200.json"]

    def config_of(gpu_name: str, **shape) -> KernelConfig:
        return config_for(gpu_name, (9, 0), **shape)

    assert config_of("NVIDIA H200", head_size=96, kv_bytes=2) == TUNED
    assert config_of("NVIDIA H200", head_size=64, kv_bytes=2) == SHIPPED[90]
    assert config_of("NVIDIA H200", head_size=96, kv_bytes=1) == SHIPPED[90].for_kv_bytes(1)
    assert config_of("NVIDIA H100", head_size=96, kv_bytes=2) == SHIPPED[90]


def test_measuring_again_replaces_only_the_same_keys(tmp_path):
    path = tmp_path / "gpu.json"
    write_tuned(path, {"a": TUNED, "b": TUNED}, {"day": 1})
    newer = replace(TUNED, num_stages=3)
    write_tuned(path, {"b": newer, "c": newer}, {"day": 2})
    assert read_tuned(path).configs == {"a": TUNED, "b": newer, "c": newer}
    assert json.loads(path.read_text())["day"] == 2


BAD_FILES = [
    ("", "Expecting value"),
    ("[]", ""),
    ("{}", "configs"),
    ('{"configs": []}', ""),
    ('{"configs": {"a": 3}}', ""),
    ('{"configs": {"a": {"tile_size": 64, "rows": 1}}}', "a has unknown fields rows, tile_size"),
    ('{"configs": {"a": {"tile_tokens": 48}}}', "tile_tokens is 48"),
    ('{"configs": {"a": {"tile_tokens": "64"}}}', "tile_tokens is '64'"),
    ('{"configs": {"a": {"tile_tokens": null}}}', "tile_tokens is None"),
    ('{"configs": {"a": {"tile_tokens": 0}}}', "tile_tokens is 0"),
    ('{"configs": {"a": {"state_cost": "cheap"}}}', "state_cost is 'cheap'"),
]


@pytest.mark.parametrize(("text", "reason"), BAD_FILES)
def test_bad_files_are_named(monkeypatch, tmp_path, text, reason):
    monkeypatch.setenv("VLLM_RELAY_CACHE", str(tmp_path))
    path = tuned_path("GPU")
    path.write_text(text)
    with pytest.raises(ValueError, match=f"gpu.json: not a file of kernel.*{reason}.*tune"):
        config_for("GPU", (9, 0), head_size=64, kv_bytes=2)


def test_files_that_cannot_be_read_are_named(tmp_path):
    path = tmp_path / "gpu.json"
    path.mkdir()
    with pytest.raises(ValueError, match="gpu.json: not a file of kernel configurations"):
        read_tuned(path)


def test_measuring_again_replaces_a_bad_file(tmp_path):
    path = tmp_path / "gpu.json"
    path.write_text("{")
    write_tuned(path, {"a": TUNED}, {})
    assert read_tuned(path).configs == {"a": TUNED}


def test_every_field_is_stored(tmp_path):
    path = tmp_path / "gpu.json"
    write_tuned(path, {"a": TUNED}, {})
    assert json.loads(path.read_text())["configs"]["a"] == asdict(TUNED)


def test_states_of_a_tile_fit_in_registers():
    for config in SHIPPED.values():
        for head_size in (32, 64, 128, 256):
            fitted = config.for_head_size(head_size)
            threads = 32 * fitted.num_warps
            assert fitted.large_rows * head_size / threads <= 64  # floats per thread

# SPDX-License-Identifier: Apache-2.0
"""A model is the same wherever its files are, and another when they hold something else."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_relay.tables.engines.model_identity import file_digest, model_identity

FILES = {"config.json": b"{}", "model.safetensors": b"weights" * 9, "tokenizer.json": b"[]"}


def folder(path: Path, **changes: bytes) -> Path:
    path.mkdir(parents=True)
    for name, content in {**FILES, **changes}.items():
        (path / name.replace("_json", ".json")).write_bytes(content)
    return path


def identity(model: Path | str, tokenizer: Path | str | None = None, **changes: Any) -> str:
    settings = {"_name_or_path": str(model), "hidden_size": 8, "transformers_version": "9"}
    hf_config = SimpleNamespace(
        to_json_string=lambda use_diff: json.dumps(settings | changes.get("settings", {})),
        _commit_hash=changes.get("commit"),
    )
    model_config = SimpleNamespace(
        model=str(model),
        revision=None,
        tokenizer=str(tokenizer or model),
        tokenizer_revision=None,
        hf_config=hf_config,
        dtype=changes.get("dtype", "bfloat16"),
        quantization=None,
        seed=0,
    )
    return model_identity(
        SimpleNamespace(
            model_config=model_config,
            cache_config=SimpleNamespace(cache_dtype="auto"),
            load_config=SimpleNamespace(load_format="auto"),
        )
    )


def test_another_place_and_time_are_the_same(tmp_path: Path) -> None:
    first, second = folder(tmp_path / "here"), folder(tmp_path / "there" / "renamed")
    os.utime(second / "model.safetensors", (1, 1))
    (second / "README.md").write_text("a copy")
    (second / ".gitattributes").write_text("")
    assert identity(first) == identity(second)


@pytest.mark.parametrize(
    "changes",
    [
        {"model.safetensors": b"weights" * 8 + b"weightz"},
        {"tokenizer.json": b"[1]"},
        {"more.safetensors": b""},
    ],
)
def test_other_content_is_another(changes: dict[str, bytes], tmp_path: Path) -> None:
    other = folder(tmp_path / "there", **changes)
    assert identity(folder(tmp_path / "here")) != identity(other)


def test_other_settings_are_another(tmp_path: Path) -> None:
    path = folder(tmp_path / "here")
    found = {
        identity(path),
        identity(path, dtype="float32"),
        identity(path, settings={"hidden_size": 9}),
        identity(path, tokenizer=folder(tmp_path / "tokenizer", **{"tokenizer.json": b"[2]"})),
    }
    assert len(found) == 4
    assert identity(path) == identity(path, settings={"transformers_version": "10"})


def test_files_of_the_hub_are_known_by_their_names(tmp_path: Path) -> None:
    content = b"weights" * 9
    name = hashlib.sha256(content).hexdigest()
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / name).write_bytes(b"not read")
    link = tmp_path / "models--a--b" / "model.safetensors"
    link.symlink_to(blobs / name)
    local = folder(tmp_path / "here") / "model.safetensors"
    assert file_digest(link) == file_digest(local) == name


def test_a_model_without_files_here_is_known_by_name_and_commit() -> None:
    assert identity("no/such-model") == identity("no/such-model")
    assert identity("no/such-model", commit="a") != identity("no/such-model", commit="b")
    assert identity("no/such-model") != identity("no/other-model")

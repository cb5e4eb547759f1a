# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import Run, start
from tests.integration.tiny_models import KINDS, save_image_model, save_model


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    kinds = [kind for kind in KINDS if kind != "qwen3"]
    models = {kind: save_model(kind, directory / kind) for kind in kinds}
    return models | {"images": save_image_model(directory / "images")}


@pytest.fixture(scope="session")
def run(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run scenarios on an engine; every different engine runs once."""
    done: dict[str, dict[str, Any]] = {}

    def run(
        backend: str,
        *,
        model: str = "llama",
        scenarios: tuple[str, ...] = ("shared",),
        multiprocessing: bool = False,
        driver: str = "engine_main",
        spawns: bool = False,
        **engine_args: Any,
    ) -> dict[str, Any]:
        engine_args |= {"attention_backend": backend, "model": str(models[model])}
        key = json.dumps([engine_args, scenarios, multiprocessing, driver, spawns], sort_keys=True)
        if key not in done:
            directory = tmp_path_factory.mktemp("run")
            result = start(directory, engine_args, scenarios, multiprocessing, driver, spawns)
            assert result.returncode == 0, result.stderr[-4000:]
            done[key] = json.loads((directory / "output.json").read_text())
        return done[key]

    return run

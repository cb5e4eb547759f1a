# SPDX-License-Identifier: Apache-2.0
"""Images for a model in this process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.integration.tiny_models import IMAGE_TOKENS, save_image_model
from tests.support import vllm_processes

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("images")
    model = save_image_model(folder / "model")
    done = vllm_processes.run_module(
        "tests.tables.engines.images_main", [str(model), str(folder)], {}
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "found.json").read_text())


def test_answers_are_those_of_vllms_own_chat(found: dict[str, Any]) -> None:
    expected = found["expected"]
    assert len(set(expected)) > 1, "all images have the same answer"
    assert found["values"] == [*expected, expected[0], None]
    assert found["of_bytes"] == expected
    assert "'nothing.png' is no file" in found["errors"]["4"]


def test_tokens_of_images_are_counted(found: dict[str, Any]) -> None:
    report = found["report"]
    # an image that is not there is no prompt that runs
    assert report["num_prompts"] == 4
    assert report["prompt_tokens"] > 3 * IMAGE_TOKENS


def test_what_vllm_refuses_is_an_error_of_the_row(found: dict[str, Any]) -> None:
    [error] = found["too_many"]
    assert "image" in error
    values, error = found["torn"]
    # the other one has an answer
    assert values == [None, found["expected"][0]]
    assert error.startswith("vLLM takes no such prompt: ")
    assert found["without"] != [None]

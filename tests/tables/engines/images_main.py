# SPDX-License-Identifier: Apache-2.0
"""Asks a model in this process about images, for test_images.py.

Usage: python -m tests.tables.engines.images_main MODEL FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image

from tests.integration.tiny_models import IMAGE_SIZE
from tests.support.small_llm import small_llm
from tests.tables.images.pictures import data_url
from vllm_relay.tables import llm_map
from vllm_relay.tables.engines.in_process import InProcessEngine, sampling_params
from vllm_relay.tables.outputs import Output
from vllm_relay.tables.question import Question

QUESTION = "Which?"
NUM_IMAGES = 3


def main() -> None:
    model, folder = sys.argv[1:]
    for number in range(NUM_IMAGES):
        pixels = np.random.RandomState(number).randint(0, 255, (IMAGE_SIZE,) * 2 + (3,), np.uint8)
        Image.fromarray(pixels).save(Path(folder, f"{number}.png"))
    llm = small_llm(model, limit_mm_per_prompt={"image": 1}, attention_backend="relay")
    engine = InProcessEngine(llm)
    files = [f"{number}.png" for number in range(NUM_IMAGES)]
    table = pa.table({"photo": [*files, files[0], "nothing.png"]})
    arguments: dict[str, Any] = {"engine": engine, "max_tokens": 8}
    result = llm_map(table, QUESTION, images={"photo": "path"}, image_folder=folder, **arguments)
    contents = [Path(folder, file).read_bytes() for file in files]
    # the same as bytes, and two in a prompt, of which the model takes one
    of_bytes = llm_map(pa.table({"photo": contents}), QUESTION, images=["photo"], **arguments)
    two = pa.table({"photo": contents[:1], "other": contents[1:2]})
    torn = pa.table({"photo": [contents[0][:40], contents[0]]})
    of_torn = llm_map(torn, QUESTION, images=["photo"], **arguments)
    too_many = llm_map(two, QUESTION, images=["photo", "other"], **arguments)
    without = llm_map(pa.table({"n": [1]}), QUESTION, **arguments)
    params = sampling_params(Question(QUESTION, ("photo",), Output(), 8))
    expected = []
    for content in contents:
        parts = [
            {"type": "text", "text": f'{QUESTION}\n\n"photo": '},
            {"type": "image_url", "image_url": {"url": data_url(content)}},
            {"type": "text", "text": "\nAnswer:"},
        ]
        [output] = llm.chat([{"role": "user", "content": parts}], params, use_tqdm=False)
        expected.append(output.outputs[0].text.strip())
    found = {
        "values": result.values.to_pylist(),
        "errors": {str(place): error for place, error in result.errors.items()},
        "report": vars(result.report),
        "of_bytes": of_bytes.values.to_pylist(),
        "torn": [of_torn.values.to_pylist(), of_torn.errors[0]],
        "too_many": list(too_many.errors.values()),
        "without": without.values.to_pylist(),
        "expected": expected,
    }
    Path(folder, "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()

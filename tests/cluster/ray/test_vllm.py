# SPDX-License-Identifier: Apache-2.0
"""Two real servers behind one endpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.tiny_models import save_model
from tests.tables.byte_tokenizer import CHAT_TEMPLATE, byte_tokenizer

# three processes that import vLLM, two of them twice
pytestmark = [pytest.mark.integration, pytest.mark.soak]


def test_two_servers_answer_as_one(tmp_path: Path) -> None:
    model = save_model("llama", tmp_path / "model")
    byte_tokenizer(CHAT_TEMPLATE).save_pretrained(model)
    # a process whose surroundings know of no Ray of other tests
    environment = {name: value for name, value in os.environ.items() if "RAY" not in name}
    environment |= {"TORCHDYNAMO_DISABLE": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    main = [sys.executable, "-m", "tests.cluster.ray.vllm_main", str(model), str(tmp_path)]
    done = subprocess.run(main, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())

    assert len(found["replicas"]) == 2
    # each beginning is computed by one, the first time
    for cached in found["cached_tokens"]:
        assert cached[0] == 0 and min(cached[1:]) > 0, found["cached_tokens"]
    assert found["streamed"] == found["whole"]
    assert [found[name][0] for name in ("no_json", "no_model", "too_long")] == [400, 404, 400]
    for name in ("no_json", "no_model", "too_long"):
        assert found[name][1]["error"]["code"] == found[name][0]

    page = found["page"]
    assert min(map(len, page["prefixes"].values())) > 0
    assert page["evicted"][0] == 200 and page["evicted"][1]["evicted_blocks"] > 0
    assert page["told"]["source"] == page["asked"]["source"]
    assert page["asked"]["node"] in page["told"]["removed"]

    # whole, or told that they are not
    for last, end in found["ends_of_streams"]:
        last = json.loads(last)
        assert end == "[DONE]" and ("choices" in last or last["error"]["code"] == 500), last
    assert found["statuses_after_kill"] == [200] * len(found["statuses_after_kill"])
    assert found["whole_after_kill"] == found["whole"]
    assert not found["left_of_the_killed"]

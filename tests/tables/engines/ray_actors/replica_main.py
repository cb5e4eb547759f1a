# SPDX-License-Identifier: Apache-2.0
"""A replica of vLLM in threads of one process, without Ray, for test_vllm.py.

Usage: python -m tests.tables.engines.ray_actors.replica_main MODEL FOLDER
"""

from __future__ import annotations

import json
import pickle
import random
import sys
from functools import partial
from pathlib import Path

from ray import exceptions

from tests.support.waiting import WAIT_S
from tests.tables.engines.ray_actors.vllm_main import ARGUMENTS, answers
from tests.tables.engines.replica_faults import ThreadActor, without_ray
from vllm_relay.tables.engines.ray_actors.engine import RayEngine
from vllm_relay.tables.engines.ray_actors.replica import start_vllm


def main(model: str, folder: str) -> None:
    actor = ThreadActor(partial(start_vllm, model, ARGUMENTS), exceptions, random.Random(0))
    tokenizer = pickle.loads(actor.facts.pickled_tokenizer or b"")
    with without_ray():
        found = {
            "replica": answers(RayEngine(actor, actor.facts, tokenizer, "a replica", WAIT_S)),
            "engine": actor.in_its_thread(answers),
        }
    Path(folder, "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

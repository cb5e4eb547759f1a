# SPDX-License-Identifier: Apache-2.0
"""A job on vLLM that is to be killed.

Usage: python -m tests.tables.engines.killed_vllm_main MODEL CHECKPOINT TOKEN_LOG RESULT NUM_ROWS

TOKEN_LOG gets a line with the number of tokens of each finished answer; RESULT the answers.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# in this process, so that killing it ends all of it
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import LLM

from tests.support.small_llm import small_llm
from tests.tables.jobs.job_cases import NUMBERS, NUMBERS_SQL, answered, numbers_table, runner
from vllm_relay.tables.engines.base import Completions, Prompt
from vllm_relay.tables.engines.in_process import InProcessEngine
from vllm_relay.tables.question import Question


class Logged(InProcessEngine):
    """Writes down the tokens of every step, those of unfinished answers too."""

    def __init__(self, llm: LLM, log: Path) -> None:
        super().__init__(llm)
        self._log = log

    def generate(self, prompts: Iterable[Prompt], question: Question) -> Completions:
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        update = scheduler.update_from_output

        def counted(scheduled: Any, output: Any) -> Any:
            sampled = sum(map(len, output.sampled_token_ids))
            with self._log.open("a") as file:
                file.write(f"{sampled}\n")
            return update(scheduled, output)

        scheduler.update_from_output = counted
        try:
            yield from super().generate(prompts, question)
        finally:
            scheduler.update_from_output = update


def main(model: str, checkpoint: str, token_log: str, result: str, num_rows: str) -> None:
    llm = small_llm(model, max_model_len=512, max_num_seqs=4)
    connection = numbers_table(int(num_rows))
    # this model ends no answer: all are cut, and would be asked about again by each process
    job = runner(connection, Logged(llm, Path(token_log)), Path(checkpoint), retry_errors=False)
    job.answer(NUMBERS_SQL, NUMBERS, "out")
    Path(result).write_text(json.dumps(answered(connection)))


if __name__ == "__main__":
    main(*sys.argv[1:])

# SPDX-License-Identifier: Apache-2.0
"""Questions to the rows of a table, answered by the recall model.

python -m tests.tables.llm_map_main FOLDER    writes answers.json there
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import polars as pl

from vllm_relay.demo.recall_model import build_recall_model
from vllm_relay.tables import PromptTemplate, llm_map, open_engine
from vllm_relay.tables.engines.in_process import InProcessEngine

TEMPLATE = PromptTemplate(before="{question} ", field="{text} ", base_after="", chat=False)
TABLE = pl.DataFrame(
    {
        "page": ["oslo harbour: amber falcon. rome mill: golden owl."] * 3,
        "gate": ["rome mill", "oslo harbour", "rome mill"],
    }
)


def main(folder: Path) -> None:
    model = build_recall_model(folder / "model", max_position_embeddings=512)
    engine = open_engine(model, enforce_eager=True, max_num_seqs=4)
    assert isinstance(engine, InProcessEngine)
    given = {"template": TEMPLATE, "max_tokens": 2}
    opened = llm_map(TABLE, "which words are written?", engine=engine, **given)
    # neither an engine nor an LLM is closed by the first job that it answers
    again = llm_map(TABLE, "which words are read?", engine=engine.llm, **given)
    one_word = llm_map(
        TABLE, "which word is written?", engine=engine, choices=["amber", "golden"], **given
    )
    engine.close()
    engine.close()
    backend = engine.llm.llm_engine.vllm_config.attention_config.backend
    answers = {
        "opened": opened.values.to_list(),
        "again": again.values.to_list(),
        "one_word": one_word.values.to_list(),
        "num_prompts": opened.report.num_prompts,
        "backend": backend.name,
    }
    (folder / "answers.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

# SPDX-License-Identifier: Apache-2.0
"""Facts that straddle two modules, asked of a model that recalls what followed two words.

python -m tests.modules.recall_main OUTPUT
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

NUM_FACTS = 8
ANSWER_WORDS = 4


def main(output: str) -> None:
    import numpy as np
    from vllm import LLM, SamplingParams

    from vllm_relay.demo.recall_model import build_recall_model
    from vllm_relay.modules import ModularLLM, Module, Schema
    from vllm_relay.modules.prompt.render import Mode

    with tempfile.TemporaryDirectory() as folder:
        model = build_recall_model(Path(folder), dtype="float32")
        llm = LLM(
            str(model),
            additional_config={"relay": {"scheduler": True}},
            attention_backend="relay",
            block_size=32,
            dtype="float32",
            enforce_eager=True,
            max_model_len=2048,
            num_gpu_blocks_override=256,
        )
    tokenizer = llm.get_tokenizer()
    rng = np.random.default_rng(0)
    words = sorted(word for word in tokenizer.get_vocab() if word.isalpha())
    order = rng.permutation(words).tolist()
    filler, order = order[:60], order[60:]

    def text(count: int) -> str:
        return " ".join(rng.choice(filler, count))

    schemas, prompts, expected = [], [], []
    for number in range(NUM_FACTS):
        fact = [order.pop() for _ in range(2 + ANSWER_WORDS)]
        other = [fact[1], *(order.pop() for _ in range(ANSWER_WORDS))]
        schemas.append(
            Schema(
                f"s{number}",
                text(5) + " ",
                Module("before", f"{text(40)} {fact[0]} "),
                Module("behind", f"{' '.join(fact[1:])} {text(30)} "),
                # the second word of the question alone would find this as well
                Module("other", f"{text(20)} {order.pop()} {' '.join(other)} {text(9)} "),
            )
        )
        question = f"{text(4)} {fact[0]} {fact[1]}"
        prompts.append(f'<prompt schema="s{number}"><before/><behind/><other/>{question}</prompt>')
        expected.append(fact[2:])
    modular = ModularLLM(llm, *schemas)
    params = SamplingParams(max_tokens=ANSWER_WORDS, temperature=0.0)
    seen: dict[str, Any] = {"expected": expected}
    modes: tuple[Mode, ...] = ("exact", "repair", "modular")
    for mode in modes:
        answers = modular.generate(prompts, params, mode=mode, use_tqdm=False)
        seen[mode] = [answer.text.split() for answer in answers]
    Path(output).write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])

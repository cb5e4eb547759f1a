# SPDX-License-Identifier: Apache-2.0
"""What Hugging Face computes in float32, in a process of its own.

Usage: python -m tests.real_model.reference_main forced MODEL OUTPUT.npy
       python -m tests.real_model.reference_main modules MODEL FOUND.json OUTPUT.json
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.real_model.workload import (
    FORCED_BRANCHES,
    forced_prompts,
    forced_token_ids,
    modular_prompts,
    schema,
    schema_store,
)


def main(what: str, model: str, *paths: str) -> None:
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        {"forced": write_forced, "modules": write_modules}[what](reference, model, *paths)


def write_forced(reference: Any, model: str, output: str) -> None:
    """Float32 [prompts, forced tokens, vocabulary]: log-probabilities of what comes there."""
    prompts, answer = forced_prompts(model), forced_token_ids(model)
    found = [None] * len(prompts)
    for branch in range(FORCED_BRANCHES):
        numbers = range(branch, len(prompts), FORCED_BRANCHES)
        texts = [prompts[number] + answer[:-1] for number in numbers]
        num_shared = len(os.path.commonprefix(texts))
        cache = reference.model(torch.tensor([texts[0][:num_shared]])).past_key_values
        cache.batch_repeat_interleave(len(texts))
        rests = [text[num_shared:] for text in texts]
        length = max(map(len, rests))
        padded = torch.tensor([rest + [0] * (length - len(rest)) for rest in rests])
        # no mask: nothing sees the padding behind it
        hidden = reference.model(padded, past_key_values=cache).last_hidden_state
        for row, number in enumerate(numbers):
            end = len(rests[row])
            logits = reference.lm_head(hidden[row, end - len(answer) : end])
            found[number] = logits.log_softmax(-1).numpy()
    np.save(output, np.stack(found))


def write_modules(reference: Any, model: str, found: str, output: str) -> None:
    """The largest difference of log-probabilities to those that an engine found, by prompt."""
    from tests.modules.reference import Meaning, Token, logits
    from vllm_relay.modules.markup.pml import parse_prompt

    reference.set_attn_implementation("eager")
    tokens = schema_store(AutoTokenizer.from_pretrained(model)).text_tokens
    worst = []
    for text, answer in zip(modular_prompts(), json.loads(Path(found).read_text()), strict=True):
        meaning = Meaning(
            schema(), parse_prompt(text), tokens, tokens.placeholder, tokens.beginning
        )
        differences = []
        for chosen, of_engine in zip(answer["token_ids"], answer["logprobs"], strict=True):
            expected = logits(reference, meaning).log_softmax(-1)
            differences += [abs(p - float(expected[int(t)])) for t, p in of_engine.items()]
            meaning.tokens.append(Token(chosen, meaning.tokens[-1].position + 1, None))
        worst.append(max(differences))
    Path(output).write_text(json.dumps(worst))


if __name__ == "__main__":
    main(*sys.argv[1:])

# SPDX-License-Identifier: Apache-2.0
"""Random modular prompts in a real LLM: what follows them, and what Hugging Face says.

python -m tests.prefix_cache.modules.logits_main MODEL MODE NUM_SCHEMAS OUTPUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

PROMPTS_PER_SCHEMA = 5
REPAIR_TOKENS = 6


def main(model: str, mode: str, num_schemas: str, output: str) -> None:
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from vllm import LLM, SamplingParams

    from tests.integration.tiny_models import MAX_MODEL_LEN_TOKENS
    from tests.prefix_cache.modules.random_prompts import SchemaMaker, random_prompt
    from tests.prefix_cache.modules.reference import Meaning, logits
    from vllm_relay.prefix_cache.modules.plan import EXTRA_ARG
    from vllm_relay.prefix_cache.modules.pml import parse_prompt
    from vllm_relay.prefix_cache.modules.schema_store import SchemaStore
    from vllm_relay.prefix_cache.modules.xml_tree import PmlError

    tokenizer = AutoTokenizer.from_pretrained(model)
    words = sorted(word for word in tokenizer.get_vocab() if word.isalpha())
    rng = np.random.default_rng(len(mode))
    store = SchemaStore(tokenizer, block_size=32, max_model_len=MAX_MODEL_LEN_TOKENS)
    rendered, meanings = [], []
    for number in range(int(num_schemas)):
        schema = SchemaMaker(rng, words, 24).schema(f"s{number}")
        store.add(schema)
        for _ in range(PROMPTS_PER_SCHEMA):
            text = random_prompt(rng, schema, words)
            try:
                rendered.append(store.render(text, mode=mode, repair_tokens=REPAIR_TOKENS))
            except PmlError as error:
                assert "with padding" in str(error), error
                continue
            tokens = store.text_tokens
            repair_tokens = REPAIR_TOKENS if mode == "repair" else 0
            meanings.append(
                Meaning(
                    schema,
                    parse_prompt(text),
                    tokens,
                    tokens.placeholder,
                    tokens.beginning,
                    repair_tokens,
                )  # fmt: skip
            )
    llm = LLM(
        model,
        additional_config={"relay": {"scheduler": True}},
        attention_backend="relay",
        block_size=32,
        dtype="float32",
        enforce_eager=True,
        max_logprobs=-1,
        max_num_batched_tokens=512,  # prompts are computed in chunks
        num_gpu_blocks_override=256,
    )
    params = [
        SamplingParams(
            max_tokens=1, temperature=0.0, logprobs=-1, detokenize=False,
            extra_args={EXTRA_ARG: each.plan.to_argument()},
        )
        for each in rendered
    ]  # fmt: skip
    prompts = [{"prompt_token_ids": each.token_ids} for each in rendered]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    reference.set_attn_implementation("eager")
    worst = 0.0
    for found, meaning in zip(outputs, meanings, strict=True):
        expected = logits(reference, meaning).log_softmax(-1)
        given = found.outputs[0].logprobs[0]
        got = torch.tensor([given[token].logprob for token in range(len(expected))])
        worst = max(worst, float((got - expected).abs().max()))
    seen = {
        "prompts": len(outputs),
        "worst": worst,
        "cached": [found.num_cached_tokens for found in outputs],
        "stored": [
            len(each.plan.seen_tokens(each.token_ids))
            - sum(run.num_tokens for run in each.plan.tail)
            for each in rendered
        ],
        "segments": sum(len(each.plan.segments) for each in rendered),
    }
    Path(output).write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])

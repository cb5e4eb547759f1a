# SPDX-License-Identifier: Apache-2.0
"""Random modular prompts in a real LLM: what follows them, and what Hugging Face says.

python -m tests.modules.logits_main MODEL MODE NUM_SCHEMAS OUTPUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

PROMPTS_PER_SCHEMA = 5
REPAIR_TOKENS = 6
MAX_TOKENS = 3
NUM_PLAIN_PROMPTS = 4


def main(model: str, mode: str, num_schemas: str, output: str) -> None:
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from vllm import LLM, SamplingParams

    from tests.integration.tiny_models import MAX_MODEL_LEN_TOKENS
    from tests.modules.random_prompts import SchemaMaker, random_prompt
    from tests.modules.reference import Meaning, PlainMeaning, Token, logits
    from vllm_relay.modules.markup.pml import parse_prompt
    from vllm_relay.modules.markup.xml_tree import PmlError
    from vllm_relay.modules.prompt.plan import EXTRA_ARG
    from vllm_relay.modules.prompt.schema_store import SchemaStore

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
            repair_tokens = REPAIR_TOKENS if mode == "repair" else None
            try:
                rendered.append(store.render(text, mode=mode, repair_tokens=repair_tokens))
            except PmlError as error:
                assert "with padding" in str(error), error
                continue
            tokens = store.text_tokens
            meanings.append(
                Meaning(
                    schema,
                    parse_prompt(text),
                    tokens,
                    tokens.placeholder,
                    tokens.beginning,
                    repair_tokens or 0,
                )  # fmt: skip
            )
    plain = [
        rng.integers(3, len(tokenizer), int(rng.integers(10, 90))).tolist()
        for _ in range(NUM_PLAIN_PROMPTS)
    ]
    llm = LLM(
        model,
        additional_config={"relay": {"scheduler": True}},
        attention_backend="relay",
        block_size=32,
        dtype="float32",
        enforce_eager=True,
        max_logprobs=-1,
        max_num_batched_tokens=64,  # prompts are computed in chunks
        max_num_seqs=16,
        num_gpu_blocks_override=256,
    )
    params = [
        SamplingParams(
            max_tokens=MAX_TOKENS, temperature=0.0, logprobs=-1, detokenize=False, ignore_eos=True,
            extra_args=extra_args,
        )
        for extra_args in [
            *({EXTRA_ARG: each.plan.to_argument()} for each in rendered), *([None] * len(plain))
        ]
    ]  # fmt: skip
    prompts = [{"prompt_token_ids": ids} for ids in [*(r.token_ids for r in rendered), *plain]]
    order = rng.permutation(len(prompts))  # modular and plain ones beside each other
    answers = llm.generate([prompts[i] for i in order], [params[i] for i in order], use_tqdm=False)
    outputs = [answers[place] for place in np.argsort(order)]
    meanings += [PlainMeaning.of(ids) for ids in plain]
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    reference.set_attn_implementation("eager")
    worst = 0.0
    for found, meaning in zip(outputs, meanings, strict=True):
        completion = found.outputs[0]
        for given, chosen in zip(completion.logprobs, completion.token_ids, strict=True):
            expected = logits(reference, meaning).log_softmax(-1)
            got = torch.tensor([given[token].logprob for token in range(len(expected))])
            worst = max(worst, float((got - expected).abs().max()))
            meaning.tokens.append(Token(chosen, meaning.tokens[-1].position + 1, None))
    outputs = outputs[: len(rendered)]
    seen = {
        "runner_is_v2": llm.llm_engine.vllm_config.use_v2_model_runner,
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

# SPDX-License-Identifier: Apache-2.0
"""Modular prompts in a real LLM with little KV space; writes what happened to a JSON file.

python -m tests.prefix_cache.modules.engine_main MODEL OUTPUT
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

NUM_MODULES = 6
NUM_AT_ONCE = 100
NUM_BLOCKS = 40


def main(model: str, output: str) -> None:
    import numpy as np
    from vllm import LLM, SamplingParams
    from vllm.exceptions import VLLMValidationError

    from vllm_relay.prefix_cache.modules.llm import ModularLLM
    from vllm_relay.prefix_cache.modules.plan import EXTRA_ARG
    from vllm_relay.prefix_cache.modules.schema import Module, Parameter, Schema

    llm = LLM(
        model,
        additional_config={"relay": {"scheduler": True}},
        attention_backend="relay",
        block_size=32,
        disable_log_stats=False,
        dtype="float32",
        enforce_eager=True,
        max_num_batched_tokens=512,
        max_num_seqs=16,
        num_gpu_blocks_override=NUM_BLOCKS,
    )
    rng = np.random.default_rng(0)
    words = sorted(word for word in llm.get_tokenizer().get_vocab() if word.isalpha())

    def text(count: int) -> str:
        return " ".join(rng.choice(words, count)) + " "

    modules = [
        Module(f"m{n}", text(30 + 7 * n), Parameter("p", 4), text(5), Module(f"in{n}", text(20)))
        for n in range(NUM_MODULES)
    ]
    modular = ModularLLM(llm, Schema("s", text(9), *modules))
    greedy = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    longer = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)

    def counts() -> Counter[str]:
        found: Counter[str] = Counter()
        for metric in llm.get_metrics():
            found[metric.name] += getattr(metric, "value", 0)
        return found

    def answers(prompts: list[str], params: Any = greedy, **keywords: Any) -> list[list[int]]:
        outputs = modular.generate(prompts, params, use_tqdm=False, **keywords)
        return [list(each.output.outputs[0].token_ids) for each in outputs]

    def prompt(numbers: tuple[int, ...], end: str) -> str:
        imports = "".join(f'<m{n} p="{words[n]}"><in{n}/></m{n}>' for n in numbers)
        return f'<prompt schema="s">{imports}{end}</prompt>'

    seen: dict[str, Any] = {}
    first = prompt((0, 1), text(8))
    rendered = modular.schemas.render(first)
    plain = {"prompt_token_ids": rendered.token_ids}
    seen["plain_before"] = list(
        llm.generate([plain], greedy, use_tqdm=False)[0].outputs[0].token_ids
    )
    llm.reset_prefix_cache()

    before = counts()
    seen["at_once"] = answers([first] * NUM_AT_ONCE)
    after = counts()
    seen["encodings_at_once"] = after["relay:module_encodings"] - before["relay:module_encodings"]
    seen["hits_at_once"] = after["relay:module_hits"] - before["relay:module_hits"]
    seen["encoded_bytes"] = (
        after["relay:module_encoded_bytes"] - before["relay:module_encoded_bytes"]
    )
    [alone] = modular.generate(first, greedy, use_tqdm=False)
    seen["alone"] = list(alone.output.outputs[0].token_ids)
    plan = rendered.plan
    seen["cached"] = [
        alone.output.num_cached_tokens,
        len(alone.output.prompt_token_ids) - sum(run.num_tokens for run in plan.tail),
    ]
    assert alone.output.prompt_token_ids == plan.seen_tokens(rendered.token_ids)
    out = llm.generate([plain], greedy, use_tqdm=False)[0]
    seen["plain_after"] = list(out.outputs[0].token_ids)
    seen["plain_cached"] = out.num_cached_tokens

    # more modules than there is room for, in all pairs, one after the other and all at once
    pairs = [(a, b) for a in range(NUM_MODULES) for b in range(a + 1, NUM_MODULES)]
    prompts = [prompt(pair, text(3 + n)) for n, pair in enumerate(pairs)]
    seen["one_by_one"] = [answers([each], longer)[0] for each in prompts]
    before = counts()
    seen["together"] = answers(prompts, longer)
    after = counts()
    seen["preemptions"] = after["vllm:num_preemptions"] - before["vllm:num_preemptions"]
    seen["evicted"] = after["relay:evicted_blocks"]
    seen["repaired"] = [answers(prompts[:4], mode="repair")] * 2
    seen["repaired"][1] = [answers([each], mode="repair")[0] for each in prompts[:4]]

    seen["reset"] = llm.reset_prefix_cache()
    seen["after_reset"] = answers([first])[0]
    seen["exact"] = answers([first], mode="exact")[0]
    whole = modular.schemas.render(first, mode="exact").token_ids
    out = llm.generate([{"prompt_token_ids": whole}], greedy, use_tqdm=False)[0]
    seen["written_out"] = list(out.outputs[0].token_ids)

    argument = plan.to_argument()
    seen["errors"] = []
    for bad in (
        SamplingParams(max_tokens=2, extra_args={EXTRA_ARG: argument}, prompt_logprobs=1),
        SamplingParams(max_tokens=2, extra_args={EXTRA_ARG: {**argument, "block_size": 64}}),
        SamplingParams(max_tokens=2, extra_args={EXTRA_ARG: {**argument, "tail": []}}),
        SamplingParams(max_tokens=2, extra_args={EXTRA_ARG: "modules"}),
        SamplingParams(max_tokens=500, extra_args={EXTRA_ARG: argument}),
    ):
        try:
            llm.generate([plain], bad, use_tqdm=False)
            seen["errors"].append("")
        except VLLMValidationError as error:
            seen["errors"].append(str(error))
    try:
        llm.generate([{"prompt_token_ids": rendered.token_ids[:-1]}],
                     SamplingParams(max_tokens=2, extra_args={EXTRA_ARG: argument}))  # fmt: skip
        seen["errors"].append("")
    except VLLMValidationError as error:
        seen["errors"].append(str(error))
    seen["at_last"] = answers([first])[0]
    Path(output).write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])

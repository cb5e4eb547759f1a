# SPDX-License-Identifier: Apache-2.0
"""Modular prompts in a real LLM with little KV space; writes what happened to a JSON file.

python -m tests.modules.engine_main MODEL OUTPUT
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


class Engine:
    """An LLM, and prompts that import some of its modules."""

    def __init__(self, model: str) -> None:
        import numpy as np
        from vllm import SamplingParams

        from tests.support.small_llm import small_relay_llm
        from vllm_relay.modules.markup.schema import Module, Parameter, Schema
        from vllm_relay.serving.modular_llm import ModularLLM

        self.llm = small_relay_llm(
            model,
            max_num_batched_tokens=512,
            max_num_seqs=16,
            num_gpu_blocks_override=NUM_BLOCKS,
            scheduling_policy="priority",
        )
        self._rng = np.random.default_rng(0)
        self._words = sorted(
            word for word in self.llm.get_tokenizer().get_vocab() if word.isalpha()
        )
        modules = [
            Module(
                f"m{n}",
                self.text(30 + 7 * n),
                Parameter("p", 4),
                self.text(5),
                Module(f"in{n}", self.text(20)),
            )
            for n in range(NUM_MODULES)
        ]
        self.modular = ModularLLM(self.llm, Schema("s", self.text(9), *modules))
        self.greedy = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        self.longer = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)

    def text(self, count: int) -> str:
        return " ".join(self._rng.choice(self._words, count)) + " "

    def prompt(self, numbers: tuple[int, ...], end: str) -> str:
        imports = "".join(f'<m{n} p="{self._words[n]}"><in{n}/></m{n}>' for n in numbers)
        return f'<prompt schema="s">{imports}{end}</prompt>'

    def answers(self, prompts: list[str], params: Any = None, **keywords: Any) -> list[list[int]]:
        outputs = self.modular.generate(prompts, params or self.greedy, use_tqdm=False, **keywords)
        return [list(each.output.outputs[0].token_ids) for each in outputs]

    def plain(self, prompt: dict[str, Any], params: Any = None) -> Any:
        return self.llm.generate([prompt], params or self.greedy, use_tqdm=False)[0]

    def counts(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for metric in self.llm.get_metrics():
            found[metric.name] += getattr(metric, "value", 0)
        return found

    def counted(self, before: Counter[str], name: str) -> int:
        return int(self.counts()[name] - before[name])


def many_at_once(engine: Engine, prompt: str) -> dict[str, Any]:
    """A cold module that many requests ask for, beside one with the same tokens as plain text."""
    rendered = engine.modular.schemas.render(prompt)
    plain = {"prompt_token_ids": rendered.token_ids}
    seen: dict[str, Any] = {"plain_before": list(engine.plain(plain).outputs[0].token_ids)}
    engine.llm.reset_prefix_cache()
    before = engine.counts()
    seen["at_once"] = engine.answers([prompt] * NUM_AT_ONCE)
    seen["encodings_at_once"] = engine.counted(before, "relay:module_encodings")
    seen["hits_at_once"] = engine.counted(before, "relay:module_hits")
    seen["encoded_bytes"] = engine.counted(before, "relay:module_encoded_bytes")
    before = engine.counts()
    [alone] = engine.modular.generate(prompt, engine.greedy, use_tqdm=False)
    seen["alone"] = list(alone.output.outputs[0].token_ids)
    num_tail_tokens = sum(run.num_tokens for run in rendered.plan.tail)
    seen["cached"] = [
        alone.output.num_cached_tokens,
        engine.counted(before, "relay:prefix_hit_tokens"),
        len(alone.output.prompt_token_ids) - num_tail_tokens,
    ]
    assert alone.output.prompt_token_ids == rendered.plan.seen_tokens(rendered.token_ids)
    out = engine.plain(plain)
    seen["plain_after"] = list(out.outputs[0].token_ids)
    seen["plain_cached"] = out.num_cached_tokens
    return seen


def more_than_there_is_room_for(engine: Engine) -> dict[str, Any]:
    """All pairs of modules, one after the other and all at once, beside plain requests."""
    pairs = [(a, b) for a in range(NUM_MODULES) for b in range(a + 1, NUM_MODULES)]
    prompts = [engine.prompt(pair, engine.text(3 + n)) for n, pair in enumerate(pairs)]
    seen: dict[str, Any] = {
        "one_by_one": [engine.answers([each], engine.longer)[0] for each in prompts]
    }
    before = engine.counts()
    priorities = [n % 3 for n in range(len(prompts))]
    seen["together"] = engine.answers(prompts, engine.longer, priority=priorities)
    seen["preemptions"] = engine.counted(before, "vllm:num_preemptions")
    seen["evicted"] = engine.counted(before, "relay:evicted_blocks")
    seen["repaired"] = [
        engine.answers(prompts[:4], mode="repair"),
        [engine.answers([each], mode="repair")[0] for each in prompts[:4]],
    ]
    return seen


def kinds_of_requests(engine: Engine, prompt: str) -> dict[str, Any]:
    """Several samples, salts, and plain and modular requests in one step."""
    from vllm import SamplingParams

    from vllm_relay.modules.engine.requests import with_plan

    rendered = engine.modular.schemas.render(prompt)
    seen: dict[str, Any] = {}
    # Triton's interpreter cannot run the kernel that V2 has for top_k
    if not engine.llm.llm_engine.vllm_config.use_v2_model_runner:
        params = SamplingParams(n=3, max_tokens=6, temperature=1.0, top_k=1, ignore_eos=True)
        [out] = engine.modular.generate(prompt, params, use_tqdm=False)
        seen["samples"] = [list(each.token_ids) for each in out.output.outputs]
    tokens = {"prompt_token_ids": rendered.token_ids}
    planned = with_plan(engine.greedy, rendered, 512)
    before = engine.counts()
    salted = [engine.plain({**tokens, "cache_salt": "s"}, planned) for _ in range(2)]
    seen["salted"] = [list(each.outputs[0].token_ids) for each in salted]
    seen["encodings_of_a_salt"] = engine.counted(before, "relay:module_encodings")
    outputs = engine.llm.generate(
        [tokens, tokens, tokens], [engine.greedy, planned, engine.greedy], use_tqdm=False
    )
    seen["mixed"] = [list(each.outputs[0].token_ids) for each in outputs]
    return seen


def aborted_while_computed(engine: Engine, prompt: str) -> dict[str, Any]:
    """The only request for a module ends while that is computed."""
    from vllm_relay.modules.engine.requests import with_plan

    engine.llm.reset_prefix_cache()
    core = engine.llm.llm_engine
    rendered = engine.modular.schemas.render(prompt)
    [inputs] = core.renderer.render_cmpl([{"prompt_token_ids": rendered.token_ids}])
    request_id = core.add_request("aborted", inputs, with_plan(engine.greedy, rendered, 512))
    core.step()
    core.abort_request([request_id or "aborted"])
    while core.has_unfinished_requests():
        core.step()
    return {"after_abort": engine.answers([prompt])[0]}


def pinned(engine: Engine, prompt: str) -> dict[str, Any]:
    """Pinned modules stay, however much else is asked for, in whatever prompt they are imported."""
    from vllm_relay.prefix_cache.pins.client import list_pins, unpin

    rendered = engine.modular.schemas.render(prompt)
    pin = engine.modular.pin(prompt, "modules")
    others = [engine.prompt((n, m), engine.text(9)) for n in (2, 3, 4) for m in (5, 1)]
    engine.answers(others, engine.longer)
    before = engine.counts()
    turned = engine.prompt((1, 0), engine.text(4))
    engine.answers([turned])
    seen = {
        "pin": [pin.tokens, pin.blocks, pin.resident],
        "to_pin": [
            sum(each.num_tokens for each in rendered.plan.segments),
            rendered.plan.num_stored_slots // 32,
            True,
        ],
        "encodings_of_pinned": engine.counted(before, "relay:module_encodings"),
    }
    unpin(engine.llm, "modules")
    assert not list_pins(engine.llm)
    return seen


def refused(engine: Engine, prompt: str) -> list[str]:
    """What is said of requests with plans that cannot be followed."""
    from msgspec.structs import replace
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    from vllm_relay.modules.prompt.plan import EXTRA_ARG

    rendered = engine.modular.schemas.render(prompt)
    plan = rendered.plan
    argument = plan.to_argument()
    tokens = {"prompt_token_ids": rendered.token_ids}
    far = replace(plan.segments[0], position_runs=((0, 2**30), (1, 5)))
    broken = (
        replace(plan, block_size=64).to_argument(),
        replace(plan, tail=()).to_argument(),
        "modules",
    )
    asked: list[tuple[dict[str, Any], SamplingParams]] = [
        (tokens, SamplingParams(prompt_logprobs=1, extra_args={EXTRA_ARG: argument})),
        *((tokens, SamplingParams(extra_args={EXTRA_ARG: each})) for each in broken),
        (tokens, SamplingParams(max_tokens=500, extra_args={EXTRA_ARG: argument})),
        (
            tokens,
            SamplingParams(
                extra_args={
                    EXTRA_ARG: replace(plan, segments=(far, *plan.segments[1:])).to_argument()
                }
            ),
        ),
        (
            {"prompt_token_ids": rendered.token_ids[:-1]},
            SamplingParams(extra_args={EXTRA_ARG: argument}),
        ),
    ]
    errors = []
    for prompt_tokens, params in asked:
        try:
            engine.plain(prompt_tokens, params)
            errors.append("")
        except VLLMValidationError as error:
            errors.append(str(error))
    return errors


def main(model: str, output: str) -> None:
    engine = Engine(model)
    prompt = engine.prompt((0, 1), engine.text(8))
    seen = many_at_once(engine, prompt)
    seen |= more_than_there_is_room_for(engine)
    seen |= kinds_of_requests(engine, prompt)
    seen["reset"] = engine.llm.reset_prefix_cache()
    seen["after_reset"] = engine.answers([prompt])[0]
    seen |= aborted_while_computed(engine, prompt)
    seen |= pinned(engine, prompt)
    seen["exact"] = engine.answers([prompt], mode="exact")[0]
    whole = engine.modular.schemas.render(prompt, mode="exact").token_ids
    seen["written_out"] = list(engine.plain({"prompt_token_ids": whole}).outputs[0].token_ids)
    seen["errors"] = refused(engine, prompt)
    seen["at_last"] = engine.answers([prompt])[0]
    Path(output).write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])

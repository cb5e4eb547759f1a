# SPDX-License-Identifier: Apache-2.0
"""Modular prompts under load in little KV space: schemas come, change and go, requests are aborted.

python -m tests.modules.soak_main MODEL SECONDS SEED OUTPUT
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.records import records_of_modules
from vllm_relay.modules.prompt.render import Mode

NUM_SCHEMAS = 6
NUM_IN_FLIGHT = 20
NUM_BLOCKS = 18  # one request may take all but one
CHECKED_SHARE = 0.1
LARGEST_ERROR = 1e-4
MODES: tuple[Mode, ...] = ("modular", "repair")
REPAIR_TOKENS = 5


@dataclass
class Asked:
    """A request that runs; `meaning` if its logits are checked."""

    meaning: Any
    aborts_after: int | None


class Soak:
    def __init__(self, model: str, seed: int) -> None:
        import numpy as np
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from vllm import LLM

        from tests.integration.tiny_models import MAX_MODEL_LEN_TOKENS
        from vllm_relay.modules import SchemaStore

        self.rng = np.random.default_rng(seed)
        self.llm = LLM(
            model,
            additional_config={"relay": {"scheduler": True}},
            attention_backend="relay",
            block_size=32,
            dtype="float32",
            enforce_eager=True,
            disable_log_stats=False,
            max_logprobs=-1,
            max_num_batched_tokens=256,
            max_num_seqs=8,
            num_gpu_blocks_override=NUM_BLOCKS,
        )
        self.engine = self.llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        tokenizer = AutoTokenizer.from_pretrained(model)
        self.words = sorted(word for word in tokenizer.get_vocab() if word.isalpha())
        self.store = SchemaStore(tokenizer, block_size=32, max_model_len=MAX_MODEL_LEN_TOKENS)
        self.max_model_len = MAX_MODEL_LEN_TOKENS
        self.reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.reference.set_attn_implementation("eager")
        self.asked: dict[str, Asked] = {}
        self.counts: Counter[str] = Counter()
        self.worst = 0.0

    def change_schemas(self) -> None:
        from tests.modules.random_prompts import SchemaMaker

        names = self.store.names()
        if len(names) > NUM_SCHEMAS or (names and self.rng.random() < 0.2):
            self.store.remove(names[int(self.rng.integers(len(names)))])
            self.counts["schemas removed"] += 1
        # a name that was there before is another schema now
        name = f"s{int(self.rng.integers(2 * NUM_SCHEMAS))}"
        self.store.add(SchemaMaker(self.rng, self.words, 30).schema(name))
        self.counts["schemas added"] += 1

    def ask(self) -> None:
        from vllm import SamplingParams

        from tests.modules.random_prompts import random_prompt
        from tests.modules.reference import Meaning
        from vllm_relay.modules.engine.requests import with_plan
        from vllm_relay.modules.markup.pml import parse_prompt
        from vllm_relay.modules.markup.xml_tree import PmlError

        names = self.store.names()
        schema = self.store[names[int(self.rng.integers(len(names)))]].schema
        text = random_prompt(self.rng, schema, self.words)
        mode = MODES[int(self.rng.integers(len(MODES)))]
        repair_tokens = REPAIR_TOKENS if mode == "repair" else None
        try:
            rendered = self.store.render(text, mode=mode, repair_tokens=repair_tokens)
        except PmlError:
            self.counts["too long"] += 1
            return
        is_checked = self.rng.random() < CHECKED_SHARE
        meaning = None
        if is_checked:
            tokens = self.store.text_tokens
            meaning = Meaning(
                schema, parse_prompt(text), tokens, tokens.placeholder, tokens.beginning,
                repair_tokens or 0,
            )  # fmt: skip
        params = SamplingParams(
            max_tokens=int(self.rng.integers(1, 60)),
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            logprobs=-1 if is_checked else None,
        )
        name = f"r{self.counts['asked']}"
        self.counts["asked"] += 1
        aborts_after = int(self.rng.integers(30)) if self.rng.random() < 0.2 else None
        self.asked[name] = Asked(meaning, aborts_after)
        prompt = {"prompt_token_ids": rendered.token_ids}
        self.engine.add_request(name, prompt, with_plan(params, rendered, self.max_model_len))

    def step(self) -> None:
        for output in self.engine.step():
            asked = self.asked.get(output.request_id)
            if asked is None:
                continue
            if asked.meaning is not None and output.outputs[0].token_ids:
                self._check(asked.meaning, output)
                asked.meaning = None
            if output.finished:
                del self.asked[output.request_id]
                self.counts["answered"] += 1
        for name, asked in list(self.asked.items()):
            if asked.aborts_after is not None:
                asked.aborts_after -= 1
                if asked.aborts_after < 0:
                    self.engine.abort_request([name])
                    del self.asked[name]
                    self.counts["aborted"] += 1

    def _check(self, meaning: Any, output: Any) -> None:
        import torch

        from tests.modules.reference import logits

        expected = logits(self.reference, meaning).log_softmax(-1)
        given = output.outputs[0].logprobs[0]
        got = torch.tensor([given[token].logprob for token in range(len(expected))])
        error = float((got - expected).abs().max())
        self.worst = max(self.worst, error)
        self.counts["checked"] += 1
        self.counts["wrong"] += error > LARGEST_ERROR

    def finish(self) -> None:
        """All requests end; counts what is left behind."""
        while self.engine.has_unfinished_requests() or self.scheduler.has_requests():
            self.step()
        pool = self.scheduler.kv_cache_manager.block_pool
        self.counts["leaked blocks"] = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        self.counts["records left"] = records_of_modules(self.scheduler.modules)
        self.counts["lost"] = len(self.asked)
        metrics: Counter[str] = Counter()
        for metric in self.llm.get_metrics():
            metrics[metric.name] += getattr(metric, "value", 0)
        for name in ("vllm:num_preemptions", "relay:module_encodings", "relay:module_hits"):
            self.counts[name.split(":")[1]] = int(metrics[name])


def main(model: str, seconds: str, seed: str, output: str) -> None:
    soak = Soak(model, int(seed))
    for _ in range(NUM_SCHEMAS):
        soak.change_schemas()
    end_s = time.monotonic() + float(seconds)
    while time.monotonic() < end_s:
        if soak.rng.random() < 0.02:
            soak.change_schemas()
        if soak.rng.random() < 0.002:
            soak.counts["resets"] += bool(soak.llm.reset_prefix_cache())
        while len(soak.asked) < NUM_IN_FLIGHT:
            soak.ask()
        soak.step()
    soak.finish()
    Path(output).write_text(json.dumps({**soak.counts, "worst": soak.worst}))


if __name__ == "__main__":
    main(*sys.argv[1:])

# SPDX-License-Identifier: Apache-2.0
"""Runs the scenarios of test_vllm.py on one engine, in a process of its own.

Usage: python -m tests.integration.engine_main OUTPUT.json ENGINE_ARGS.json SCENARIO...
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams

from tests.integration.tiny_models import MAX_MODEL_LEN_TOKENS, VOCAB_SIZE

ENGINE_ARGS = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "max_model_len": MAX_MODEL_LEN_TOKENS,
    "max_num_batched_tokens": 96,  # prompts are longer: they are prefilled in chunks
    "max_num_seqs": 12,
    "num_gpu_blocks_override": 200,
    "enable_prefix_caching": True,
    "disable_log_stats": False,
    "seed": 0,
}


def tokens(seed: int, count: int) -> list[int]:
    return [3 + (seed * 7919 + i * i * 31 + i * 17) % (VOCAB_SIZE - 3) for i in range(count)]


def shared_prompts() -> list[dict[str, list[int]]]:
    """Two families with prefixes of 130 tokens; half of each share 70 more; one loner."""
    prompts = [tokens(99, 50)]
    for family in range(2):
        for member in range(5):
            nested = tokens(10 + family, 70) if member % 2 else []
            prompts.append(tokens(family, 130) + nested + tokens(20 + member, 3 + 9 * member))
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def greedy(max_tokens: int, **kwargs: Any) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, **kwargs
    )


def completion(output: Any) -> dict[str, Any]:
    """Token ids, and at each position how far the best token was ahead of the second."""
    leads = []
    for logprobs in output.logprobs or []:
        best, second = sorted((entry.logprob for entry in logprobs.values()), reverse=True)[:2]
        leads.append(best - second)
    return {"token_ids": list(output.token_ids), "leads": leads}


def run_shared(llm: LLM) -> Any:
    """Greedy decoding; the second round finds its prefixes in the cache."""
    rounds = [llm.generate(shared_prompts(), greedy(20, logprobs=2), use_tqdm=False) for _ in "12"]
    return [completion(request.outputs[0]) for outputs in rounds for request in outputs]


def run_few_tokens(llm: LLM) -> Any:
    """For kernels that take long: prompts in chunks beside decodes, and a few steps of decodes."""
    outputs = llm.generate(shared_prompts()[::2], greedy(5, logprobs=2), use_tqdm=False)
    return [completion(request.outputs[0]) for request in outputs]


def run_parallel_sampling(llm: LLM) -> Any:
    params = SamplingParams(n=3, temperature=0.8, max_tokens=12, ignore_eos=True, detokenize=False)
    outputs = llm.generate(shared_prompts()[:4], params, use_tqdm=False)
    return [list(output.token_ids) for request in outputs for output in request.outputs]


def run_prompt_logprobs(llm: LLM) -> Any:
    outputs = llm.generate(shared_prompts()[:3], greedy(1, prompt_logprobs=0), use_tqdm=False)
    return [
        [next(iter(position.values())).logprob for position in request.prompt_logprobs[1:]]
        for request in outputs
    ]


def run_abort(llm: LLM) -> Any:
    """Every second request is aborted in the middle; the others must not notice."""
    engine = llm.llm_engine
    for index, prompt in enumerate(shared_prompts()):
        engine.add_request(f"abort-{index}", prompt, greedy(20, logprobs=2))
    finished, steps = {}, 0
    while engine.has_unfinished_requests():
        for request in engine.step():
            if request.finished:
                finished[request.request_id] = completion(request.outputs[0])
        steps += 1
        if steps == 12:
            engine.abort_request([f"abort-{index}" for index in range(1, 11, 2)])
    return {name: finished[name] for name in sorted(finished) if int(name.split("-")[1]) % 2 == 0}


def run_priorities(llm: LLM) -> Any:
    """With policy "priority"; every third request is less urgent."""
    priorities = [int(index % 3 == 0) for index in range(len(shared_prompts()))]
    outputs = llm.generate(
        shared_prompts(), greedy(20, logprobs=2), priority=priorities, use_tqdm=False
    )
    return [completion(request.outputs[0]) for request in outputs]


def run_salts(llm: LLM) -> Any:
    """Requests of two tenants, who must not share; cached tokens are told too."""
    prompts = [
        {**prompt, "cache_salt": "ab"[index % 2]} for index, prompt in enumerate(shared_prompts())
    ]
    outputs = llm.generate(prompts, greedy(8, logprobs=2), use_tqdm=False)
    return [completion(request.outputs[0]) for request in outputs]


def run_logits(llm: LLM) -> Any:
    """All logits of the first generated tokens; wants logprobs_mode="raw_logits"."""
    outputs = llm.generate(shared_prompts()[::3], greedy(12, logprobs=-1), use_tqdm=False)
    return [
        [
            [step[token].logprob for token in range(VOCAB_SIZE)]
            for step in output.outputs[0].logprobs
        ]
        for output in outputs
    ]


def evict_everything(llm: LLM) -> None:
    """Empties the device's prefix cache. In a process of its own a core can only be told to reset
    it, after which contexts are known only if they are in a folder."""
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    if core is None:
        llm.reset_prefix_cache()
    else:
        core.scheduler.kv_cache_manager.reset_prefix_cache()


def run_damaged_context(llm: LLM) -> Any:
    """Before a context is kept, then twice after its file was damaged while open, or is gone: of
    several ranks, that of the last one."""
    from vllm_relay.long_context.client import keep_context, list_contexts

    folder = Path(llm.llm_engine.vllm_config.additional_config["relay"]["context_dir"])
    answers = []
    for seed in range(2):
        document = tokens(50 + seed, 203)
        prompts = [{"prompt_token_ids": [*document, *tokens(60 + i, 5 + 40 * i)]} for i in range(4)]
        rounds = [llm.generate(prompts, greedy(12, logprobs=2), use_tqdm=False)]
        keep_context(llm, document)
        while any(each.state == "indexing" for each in list_contexts(llm)):
            time.sleep(0.01)
        paths = sorted(folder.rglob("*.relayctx"))
        for path in paths[-1].parent.glob("*.relayctx"):
            if seed:
                path.unlink()
            else:
                content = bytearray(path.read_bytes())
                content[len(content) // 3 :: 4096] = b"!" * len(content[len(content) // 3 :: 4096])
                with path.open("r+b") as file:  # the same file: it is mapped already
                    file.write(content)
        for _ in range(2):
            evict_everything(llm)
            rounds.append(llm.generate(prompts, greedy(12, logprobs=2), use_tqdm=False))
        answers.append([[completion(each.outputs[0]) for each in outputs] for outputs in rounds])
    return answers


def _ask_about_document(llm: LLM) -> Any:
    document = tokens(50, 203)  # ends in the middle of a block
    prompts = [{"prompt_token_ids": [*document, *tokens(60 + i, 1 + 19 * i)]} for i in range(2)]
    return llm.generate(prompts, greedy(5, logprobs=2), use_tqdm=False)


def run_document(llm: LLM) -> Any:
    """A few tokens, for kernels that take long."""
    return [completion(output.outputs[0]) for output in _ask_about_document(llm)]


def run_kept_document(llm: LLM) -> Any:
    """The same, with a document that is kept."""
    from vllm_relay.long_context.client import keep_context

    keep_context(llm, tokens(50, 203))
    evict_everything(llm)
    outputs = _ask_about_document(llm)
    return {
        "completions": [completion(output.outputs[0]) for output in outputs],
        "cached_tokens": [output.num_cached_tokens for output in outputs],
    }


def run_contexts(llm: LLM) -> Any:
    """Prompts that begin like a kept one, before it is kept, then, and when it is deleted."""
    from vllm_relay.long_context.client import delete_context, keep_context, list_contexts

    document = tokens(50, 203)  # ends in the middle of a block
    prompts = [{"prompt_token_ids": [*document, *tokens(60 + i, 5 + 40 * i)]} for i in range(4)]
    prompts.append({"prompt_token_ids": [*document[:150], *tokens(70, 9)]})

    def ask() -> Any:
        evict_everything(llm)
        outputs = llm.generate(prompts, greedy(12, logprobs=2), use_tqdm=False)
        return {
            "completions": [completion(output.outputs[0]) for output in outputs],
            "cached_tokens": [output.num_cached_tokens for output in outputs],
        }

    before = ask()
    known = keep_context(llm, document)
    outputs = llm.generate(prompts, greedy(12, logprobs=2), use_tqdm=False)
    while list_contexts(llm)[0].state == "indexing":
        time.sleep(0.01)
    [indexed] = list_contexts(llm)
    kept = ask()
    delete_context(llm, indexed.context_id)
    return {
        "before": before,
        "fresh": [completion(output.outputs[0]) for output in outputs],
        "kept": kept,
        "deleted": ask(),
        "states": [known.state, indexed.state],
        "left": len(list_contexts(llm)),
    }


def run_chat(llm: LLM) -> Any:
    """A conversation without contexts, then kept turn by turn: each continues the one before."""
    from vllm_relay.long_context.client import list_contexts
    from vllm_relay.long_context.orders import KEEP_ARG

    def ask(prompt: list[int], **kwargs: Any) -> Any:
        evict_everything(llm)
        params = greedy(6, logprobs=2, **kwargs)
        return llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0]

    prompts, before = [tokens(50, 270)], []
    for turn in range(3):
        output = ask(prompts[-1])
        before.append(completion(output.outputs[0]))
        prompts.append([*prompts[-1], *output.outputs[0].token_ids, *tokens(60 + turn, 30)])
    kept, cached_tokens = [], []
    for prompt in prompts[:3]:
        output = ask(prompt, extra_args={KEEP_ARG: True})
        kept.append(completion(output.outputs[0]))
        cached_tokens.append(output.num_cached_tokens)
    fresh = ask(prompts[2])
    while any(each.state == "indexing" for each in list_contexts(llm)):
        time.sleep(0.01)
    contexts = sorted(list_contexts(llm), key=lambda each: each.num_tokens)
    stored = ask(prompts[2])
    numbers = {each.context_id: number for number, each in enumerate(contexts)}
    return {
        "before": before,
        "kept": kept,
        "cached_tokens": cached_tokens,
        "again": [completion(each.outputs[0]) for each in (fresh, stored)],
        "num_tokens": [each.num_tokens for each in contexts],
        "parents": [numbers.get(each.parent_id) for each in contexts],
    }


def run_evicted_contexts(llm: LLM) -> Any:
    """Three contexts in a folder with room for two; one leaves while a request reads it. All are
    the operator's: those of clients would leave first."""
    from vllm_relay.commands import engine as commands
    from vllm_relay.long_context.client import keep_context, list_contexts
    from vllm_relay.long_context.orders import KEEP_ARG

    folder = Path(llm.llm_engine.vllm_config.additional_config["relay"]["context_dir"])
    documents = [tokens(50 + seed, 203) for seed in range(3)]
    prompts = [{"prompt_token_ids": [*each, *tokens(60, 9)]} for each in documents]
    ids: list[str] = []

    def keep(document: list[int]) -> None:
        ids.append(keep_context(llm, document).context_id)
        while any(each.state == "indexing" for each in list_contexts(llm)):
            time.sleep(0.01)

    def ask(number: int) -> Any:
        evict_everything(llm)
        [output] = llm.generate([prompts[number]], greedy(40, logprobs=2), use_tqdm=False)
        return {**completion(output.outputs[0]), "cached_tokens": output.num_cached_tokens}

    def stored() -> list[int]:
        return sorted(ids.index(each.stem) for each in folder.glob("*.relayctx"))

    before = [ask(number) for number in range(3)]
    for number in (0, 1):
        keep(documents[number])
    asked = [ask(0)]
    keep(documents[2])
    seen = [[ids.index(each.context_id) for each in list_contexts(llm)], stored()]
    evict_everything(llm)
    engine, finished = llm.llm_engine, {}
    engine.add_request("reader", prompts[0], greedy(40, logprobs=2))
    engine.add_request("user", prompts[2], greedy(1))
    params = greedy(1, extra_args={KEEP_ARG: True})
    commands.call(engine, "declare_context", {"token_ids": documents[1]})
    engine.add_request("kept", {"prompt_token_ids": documents[1]}, params)
    while engine.has_unfinished_requests():
        for request in engine.step():
            if request.finished:
                finished[request.request_id] = request.outputs[0]
        if "kept" in finished and "reader" not in finished and 0 in stored():
            time.sleep(0.1)  # an index is being built while the reader goes on
        elif "reader" not in finished and stored() not in seen:
            seen.append(stored())
    return {
        "before": before,
        "seen": seen,
        "reader": completion(finished["reader"]),
        "asked": [*asked, *(ask(each) for each in range(3))],
    }


def run_preempted(llm: LLM) -> Any:
    """Every request is preempted once in the middle of its output."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    engine, finished, steps = llm.llm_engine, {}, 0
    for index, prompt in enumerate(shared_prompts()):
        engine.add_request(f"preempted-{index}", prompt, greedy(20, logprobs=2))
    while engine.has_unfinished_requests():
        for request in engine.step():
            if request.finished:
                finished[request.request_id] = completion(request.outputs[0])
        steps += 1
        if steps in (9, 17):
            while scheduler.running:
                request = scheduler.running.pop()
                scheduler.kv_cache_manager.block_pool.reset_prefix_cache()
                scheduler._preempt_request(request, time.monotonic())
    return finished


def run_reloaded(llm: LLM) -> Any:
    """As "shared", but the second round finds nothing on the device."""
    rounds = []
    for _ in "12":
        rounds += llm.generate(shared_prompts(), greedy(20, logprobs=2), use_tqdm=False)
        evict_everything(llm)
    return [completion(request.outputs[0]) for request in rounds]


def run_pinned(llm: LLM) -> Any:
    """A prompt before it is pinned; then, when all that is not pinned has left the cache."""
    from vllm_relay.prefix_cache.pins.client import pin, unpin

    system_prompt = tokens(7, 210)
    prompt = {"prompt_token_ids": [*system_prompt, *tokens(8, 9)]}
    outputs = llm.generate([prompt], greedy(8, logprobs=2), use_tqdm=False)
    entry = pin(llm, system_prompt)
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    pool.free_blocks(pool.get_new_blocks(pool.get_num_free_blocks()))
    outputs += llm.generate([prompt], greedy(8, logprobs=2), use_tqdm=False)
    unpin(llm, entry.id)
    return {
        "completions": [completion(output.outputs[0]) for output in outputs],
        "cached_tokens": [output.num_cached_tokens for output in outputs],
        "resident": entry.resident,
        "tokens": entry.tokens,
    }


def run_reset(llm: LLM) -> Any:
    """Whether every block has come back."""
    return llm.reset_prefix_cache()


SCENARIOS = {
    "pinned": run_pinned,
    "reloaded": run_reloaded,
    "priorities": run_priorities,
    "salts": run_salts,
    "reset": run_reset,
    "logits": run_logits,
    "contexts": run_contexts,
    "chat": run_chat,
    "document": run_document,
    "kept_document": run_kept_document,
    "damaged_context": run_damaged_context,
    "evicted_contexts": run_evicted_contexts,
    "preempted": run_preempted,
    "shared": run_shared,
    "few_tokens": run_few_tokens,
    "parallel_sampling": run_parallel_sampling,
    "prompt_logprobs": run_prompt_logprobs,
    "abort": run_abort,
}


def main() -> None:
    output_path, args_path, *names = sys.argv[1:]
    llm = LLM(**{**ENGINE_ARGS, **json.loads(Path(args_path).read_text())})
    results = {name: SCENARIOS[name](llm) for name in names}
    results["metrics"] = {
        metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")
    }
    Path(output_path).write_text(json.dumps(results))


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""How many long requests are served at once from a KV cache that holds one of them densely.

First what a process takes beside the most that it had in steps of short requests, against
`host_memory_gib`: with requests for which there is no more room, and with contexts in memory that
are read while they are indexed and that requests drive out; of a model of eight layers of 8 kv
heads of 128 with random weights.

Then the demo's recall model; every request has a document of its own and a question about it. The
KV cache has as many blocks as one request with dense attention needs. "at once" are requests that
generate in the same step; an answer is right if all its tokens are. Counts, not times.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.long_context import host_memory
from benchmarks.support.formatting import Row
from benchmarks.support.options import argument_parser, run_as_vllm_worker
from benchmarks.support.result import Goal, Result
from vllm_relay.demo.long_contexts.workload import chronicle_workload
from vllm_relay.demo.recall_model import MAX_POSITIONS, build_recall_model
from vllm_relay.demo.requests import tokenize
from vllm_relay.demo.workload import Conversations

BLOCK_SIZE_TOKENS = 128
DOCUMENT_TOKENS = 16_300
PROMPT_TOKENS = 16_384
AT_ONCE_GOALS = (8, 16)
MEMORY_GOALS = (1.05, 1.0)


def document_of(num_tokens: int, seed: int) -> Conversations:
    """A document and a question about it."""
    return chronicle_workload(
        document_tokens=num_tokens, num_questions=1, output_tokens=2, seed=seed
    )


def serve(llm: Any, prompts: list[list[int]], output_tokens: int) -> tuple[list[list[int]], Row]:
    """Answers to all prompts, and how many requests generated at once."""
    from benchmarks.support.decoding import add_request, exactly

    engine = llm.llm_engine
    pool = engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    names = [add_request(engine, prompt, exactly(output_tokens)) for prompt in prompts]
    answers: dict[str, list[int]] = {}
    at_once, most_blocks = 0, 0
    while engine.has_unfinished_requests():
        outputs = engine.step()
        if len(outputs) > at_once:
            at_once = len(outputs)
            most_blocks = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        for output in outputs:
            if output.finished:
                answers[output.request_id] = list(output.outputs[0].token_ids)
    preemptions = next(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
    row: Row = {
        "requests": len(prompts),
        "at once": at_once,
        "KV blocks held then": most_blocks,
        "preemptions": preemptions,
    }
    return [answers[name] for name in names], row


def main() -> None:
    parser = argument_parser(__doc__, rounds=1, threads=2)
    parser.add_argument("--requests", type=int, default=24, help="(%(default)s)")
    parser.add_argument("--output-tokens", type=int, default=256, help="an answer (%(default)s)")
    options = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the KV cache is looked at
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    run_as_vllm_worker(options.threads)
    result = Result.begin(__file__, __doc__, options)
    document_tokens, prompt_tokens = DOCUMENT_TOKENS, PROMPT_TOKENS
    if options.smoke:
        document_tokens, prompt_tokens = 5000, 5120
        options.requests, options.output_tokens = 3, 24
    load = host_memory.SMOKE_LOAD if options.smoke else host_memory.Load()
    with tempfile.TemporaryDirectory(prefix="relay-bench-") as name:
        rows = host_memory.measure(Path(name), load)
    result.add_table("Host memory of a process", rows)
    most = max(row["taken over limit"] for row in rows)
    goal = Goal("host memory taken over host_memory_gib", most, *MEMORY_GOALS, lower_is_better=True)
    result.add_goal(goal)
    from vllm import LLM

    with tempfile.TemporaryDirectory(prefix="relay-bench-") as folder:
        model = str(build_recall_model(Path(folder, "model"), dtype="bfloat16"))
        tokenizer = AutoTokenizer.from_pretrained(model)
        requests = [
            tokenize(tokenizer, [document_of(document_tokens, seed)])[0]
            for seed in range(options.requests)
        ]
        num_blocks = -(-prompt_tokens // BLOCK_SIZE_TOKENS)
        llm = LLM(
            model,
            attention_backend="relay_sparse",
            dtype="bfloat16",
            max_model_len=min(MAX_POSITIONS, prompt_tokens + options.output_tokens),
            max_num_seqs=options.requests,
            max_num_batched_tokens=1024,
            num_gpu_blocks_override=num_blocks + 1,  # and vLLM's null block
            block_size=BLOCK_SIZE_TOKENS,
            enforce_eager=True,
            disable_log_stats=False,
            seed=0,
        )
        prompts = [request.prompt_token_ids for request in requests]
        found, row = serve(llm, prompts, options.output_tokens)
    pairs = zip(requests, found, strict=True)
    row["right"] = sum(tokens[:2] == list(r.expected_token_ids[:2]) for r, tokens in pairs)
    row = {"KV blocks": num_blocks, "prompt tokens": len(prompts[0]), **row}
    result.add_table("Requests served from the KV cache of one", [row])
    num_tokens = len(prompts[0]) + options.output_tokens
    what = f"requests of {num_tokens} tokens at once"
    result.add_goal(Goal(what, row["at once"], *AT_ONCE_GOALS))
    result.end(options)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""The process of one engine for `part_engine`: output tokens per second of every workload."""

import json
import sys
import time
from pathlib import Path
from typing import Any

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


def prompts_of(workload: dict[str, Any]) -> list[list[int]]:
    """Prompts that share a prefix of this workload alone, and differ in their first own token."""
    samples = 16 if workload["own_tokens"] == 1 else workload["requests"]
    prompts = []
    for request in range(workload["requests"]):
        seed = request // samples + sum(map(ord, workload["name"]))
        prefix = [3 + (seed * 7919 + i * i * 31) % 997 for i in range(workload["prefix_tokens"])]
        own = [1000 + request] + [
            3 + (request * 7919 + i * 17) % 997 for i in range(workload["own_tokens"] - 1)
        ]
        prompts.append(prefix + own)
    return prompts


def main(order: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams

    folder = Path(order["folder"])
    (folder / "config.json").write_text(json.dumps(LLAMA_3_8B))
    llm = LLM(
        str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        attention_backend=order["backend"],
        max_model_len=36864,
        max_num_seqs=256,
        gpu_memory_utilization=0.8,
        enable_prefix_caching=True,
        seed=0,
        # decodes are replayed in full by both; compiling layers would take a minute an engine
        compilation_config={
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": sorted({w["requests"] for w in order["workloads"]}),
        },
    )
    rates = {}
    for workload in order["workloads"]:
        prompts = [{"prompt_token_ids": tokens} for tokens in prompts_of(workload)]
        sampling = SamplingParams(
            temperature=0, max_tokens=workload["output_tokens"], ignore_eos=True, detokenize=False
        )
        # fills the prefix cache, so that what is timed is decoding
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1, detokenize=False))
        began_s = time.perf_counter()
        outputs = llm.generate(prompts, sampling)
        took_s = time.perf_counter() - began_s
        rates[workload["name"]] = sum(len(o.outputs[0].token_ids) for o in outputs) / took_s
        (folder / "result.json").write_text(json.dumps(rates))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

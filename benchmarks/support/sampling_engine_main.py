# SPDX-License-Identifier: Apache-2.0
"""The process of an engine: starts vLLM and times samples of one prompt."""

from __future__ import annotations

import sys
import time

from vllm import LLM, SamplingParams

from vllm_relay.demo.engine_main import start_llm
from vllm_relay.demo.engine_process import serve


def sample(llm: LLM, prompt: list[int], num_samples: int, output_tokens: int) -> float:
    """Seconds for all samples of a prompt, the prompt's own computation with them."""
    sampling = SamplingParams(
        n=num_samples, temperature=1, max_tokens=output_tokens, ignore_eos=True
    )
    begin_s = time.perf_counter()
    (request,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    taken_s = time.perf_counter() - begin_s
    lengths = [len(output.token_ids) for output in request.outputs]
    if lengths != [output_tokens] * num_samples:
        raise RuntimeError(f"{lengths} tokens, expected {num_samples} samples of {output_tokens}")
    return taken_s


if __name__ == "__main__":
    serve(int(sys.argv[1]), start_llm, sample)

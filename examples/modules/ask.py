# SPDX-License-Identifier: Apache-2.0
"""Answer a prompt of a schema twice, and show how much of it was cached.

python examples/modules/ask.py MODEL examples/modules/travel.xml examples/modules/travel_prompt.xml
"""

import argparse
from pathlib import Path

from vllm import LLM, SamplingParams

from vllm_relay.modules import ModularLLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder or hub id of an instruction-tuned model")
    parser.add_argument("schema", type=Path)
    parser.add_argument("prompt", type=Path)
    parser.add_argument("--mode", default="modular", choices=("modular", "repair", "exact"))
    options = parser.parse_args()

    llm = LLM(
        options.model,
        attention_backend="relay",
        additional_config={"relay": {"scheduler": True}},
    )
    modular = ModularLLM(llm, options.schema)
    params = SamplingParams(max_tokens=64, temperature=0.0)
    cached_tokens = []
    for _ in range(2):
        [answer] = modular.generate(options.prompt.read_text(), params, mode=options.mode)
        print(answer.text)
        cached_tokens.append(answer.output.num_cached_tokens)
    print(f"Look at: of {len(answer.output.prompt_token_ids)} prompt tokens, {cached_tokens[0]} "
          f"were cached the first time, as modules are computed before the prompts that use them, "
          f"and {cached_tokens[1]} the second")  # fmt: skip


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Chats under one system prompt, offline: it is computed once, and each step reads it once.

python examples/chat.py MODEL      a folder or hub id of an instruction-tuned model
"""

import argparse
from pathlib import Path

from vllm import LLM, SamplingParams

SYSTEM_PROMPT = Path(__file__).with_name("hotel.txt").read_text()
QUESTIONS = [
    "We arrive at noon. Can we have our room?",
    "When is breakfast on Sunday, and what does it cost for two adults?",
    "May I bring my dog?",
    "How do I get to you from the station?",
    "I come by car. Where can I leave it?",
    "Until when can I cancel?",
    "My son is three. Do you have a bed for him?",
    "Is there a room for a guest in a wheelchair?",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder or hub id of an instruction-tuned model")
    options = parser.parse_args()

    llm = LLM(options.model, attention_backend="relay", disable_log_stats=False)
    system = {"role": "system", "content": SYSTEM_PROMPT}
    chats = [[system, {"role": "user", "content": question}] for question in QUESTIONS]
    answers = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=48))
    for question, answer in zip(QUESTIONS, answers, strict=True):
        print(f"{question}\n    {' '.join(answer.outputs[0].text.split())}")

    metrics = llm.get_metrics()
    counted = {metric.name: metric.value for metric in metrics if "kv_tokens" in metric.name}
    print(f"Look at: {len(chats)} chats attended to {counted['relay:kv_tokens_logical']:,.0f} KV "
          f"tokens, and {counted['relay:kv_tokens_read']:,.0f} were read")  # fmt: skip


if __name__ == "__main__":
    main()

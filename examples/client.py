# SPDX-License-Identifier: Apache-2.0
"""Ask a server many questions under one system prompt at once.

vllm serve MODEL --attention-backend relay --additional-config.relay.scheduler true
python examples/client.py http://localhost:8000      VLLM_API_KEY holds the key, if there is one

The server is vLLM's and so is its API: a client has nothing to say of relay.
"""

import argparse
import os
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

SYSTEM_PROMPT = Path(__file__).with_name("hotel.txt").read_text()
QUESTIONS = [
    "We arrive at noon. Can we have our room?",
    "When is breakfast on Sunday?",
    "What does a dog cost?",
    "Which tram do I take?",
    "Can I reserve a place for my car?",
    "I have to cancel for tomorrow. What do I pay?",
    "Is there a cot?",
    "Who sends me the invoice?",
]


def kv_tokens(server: str) -> dict[str, float]:
    """How many KV tokens requests attended to so far, and how many were read."""
    with urllib.request.urlopen(f"{server}/metrics") as page:
        families = text_string_to_metric_families(page.read().decode())
    return {
        family.name.removeprefix("relay:kv_tokens_"): sum(
            sample.value for sample in family.samples if sample.name.endswith("_total")
        )
        for family in families
        if family.name.startswith("relay:kv_tokens_")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("server", help="http://...")
    server = parser.parse_args().server.rstrip("/")

    client = OpenAI(base_url=f"{server}/v1", api_key=os.environ.get("VLLM_API_KEY", "none"))
    model = client.models.list().data[0].id

    def ask(question: str) -> str:
        answer = client.chat.completions.create(
            model=model,
            messages=[
                {"role": "system", "content": SYSTEM_PROMPT},
                {"role": "user", "content": question},
            ],
            temperature=0.0,
            max_tokens=48,
        )
        return " ".join((answer.choices[0].message.content or "").split())

    before = kv_tokens(server)
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        for question, answer in zip(QUESTIONS, pool.map(ask, QUESTIONS), strict=True):
            print(f"{question}\n    {answer}")
    after = kv_tokens(server)
    if not after:
        raise SystemExit(f"{server} does not share: start it with --attention-backend relay")
    logical, read = (after[name] - before[name] for name in ("logical", "read"))
    print(f"Look at: the answers attended to {logical:,.0f} KV tokens, and {read:,.0f} were read")


if __name__ == "__main__":
    main()

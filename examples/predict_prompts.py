# SPDX-License-Identifier: Apache-2.0
"""Write a file of prompts, and predict how much of them the prefix cache finds, with no model run.

python examples/predict_prompts.py MODEL      a folder or hub id: its tokenizer, and no weights

It is what `vllm-relay predict FILE --model MODEL` does with a file of yours.
"""

import argparse
import json
import tempfile
from pathlib import Path

from vllm_relay.prefix_cache.predict.run import run_predict

NOTES = Path(__file__).with_name("hotel.txt").read_text()
HOTELS = ["Quince", "Heron", "Lantern", "Poplar", "Granite", "Saffron", "Willow", "Compass"]
QUESTIONS = ["When is breakfast?", "May I bring a dog?", "Where do I park?", "Is there a cot?"]
CACHE_TOKENS = 3 * 1024
BLOCK_TOKENS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder or hub id")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        prompts, results = Path(folder, "prompts.jsonl"), Path(folder, "results.json")
        with prompts.open("w") as file:
            for question in QUESTIONS * 4:
                for hotel in HOTELS:
                    messages = [
                        {"role": "system", "content": NOTES.replace("Quince", hotel)},
                        {"role": "user", "content": question},
                    ]
                    print(json.dumps({"messages": messages, "max_tokens": 32}), file=file)
        rates = {}
        for scheduler in ("stock", "relay"):
            status = run_predict(
                prompts,
                options.model,
                blocks=[CACHE_TOKENS // BLOCK_TOKENS],
                block_size=BLOCK_TOKENS,
                max_model_len=1024,
                scheduler=scheduler,
                json_path=results,
            )
            if status:
                raise SystemExit(status)
            [found] = json.loads(results.read_text())["predictions"]
            rates[scheduler] = found["hit_rate"]
    print(f"Look at: in a cache of {CACHE_TOKENS:,} tokens vLLM's scheduler finds "
          f"{rates['stock']:.0%} of the prompts, relay's {rates['relay']:.0%}")  # fmt: skip


if __name__ == "__main__":
    main()

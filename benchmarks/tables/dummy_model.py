# SPDX-License-Identifier: Apache-2.0
"""A model with random weights whose tokenizer knows the texts of the benchmark."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

from benchmarks.support.model import Model

VOCAB_SIZE = 16_384
HALF_BILLION = Model(
    hidden_size=896, intermediate_size=4864, num_heads=14, num_kv_heads=2, num_layers=24,
    vocab_size=VOCAB_SIZE,
)  # fmt: skip
TINY = Model(
    hidden_size=128, intermediate_size=256, num_heads=4, num_kv_heads=2, num_layers=2,
    vocab_size=VOCAB_SIZE,
)  # fmt: skip
_CHAT_TEMPLATE = (
    "<s>{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}</s>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def save_model(model: Model, texts: Iterable[str], folder: Path) -> str:
    """Writes a configuration, and a byte-level BPE trained on the texts; returns the folder."""
    model.save(folder)
    bpe = ByteLevelBPETokenizer()
    special = ["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>"]
    bpe.train_from_iterator(texts, vocab_size=VOCAB_SIZE, special_tokens=special)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    return str(folder)

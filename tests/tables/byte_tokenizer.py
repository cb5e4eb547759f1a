# SPDX-License-Identifier: Apache-2.0
"""A small tokenizer."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content | trim }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def byte_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """A token per byte, some for pairs that fields end and begin with, and one that ends within a
    character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    newline = "\N{LATIN CAPITAL LETTER C WITH DOT ABOVE}"
    merges = [('"', newline), ('"', ":"), ("e", "r"), ("i", "s"), (newline, newline)]
    merges += [("a", "\N{LATIN CAPITAL LETTER A WITH TILDE}")]  # the first byte of many letters
    tokens = ["<s>", "</s>", "<|end|>", *alphabet, *map("".join, merges)]
    backend = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<|end|>"],
    )
    tokenizer.chat_template = chat_template
    return tokenizer

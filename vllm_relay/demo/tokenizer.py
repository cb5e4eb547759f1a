# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of the recall model: one token per word, blind to case and punctuation."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from vllm_relay.demo.words import ADJECTIVES, CITIES, NOUNS, PLACES, PROSE

UNK_TOKEN, BOS_TOKEN, EOS_TOKEN = "<unk>", "<s>", "</s>"
ROLE_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>")
UNK_TOKEN_ID, BOS_TOKEN_ID, EOS_TOKEN_ID = 0, 1, 2

# no generation prompt: the model continues the last two words of the last message
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %} <|{{ message['role'] }}|> "
    "{{ message['content'] }}{% endfor %}"
)


def vocabulary() -> list[str]:
    """All tokens in the order of their ids: special tokens, then lower-case words."""
    words = [*CITIES, *PLACES, *ADJECTIVES, *NOUNS, *PROSE]
    return [UNK_TOKEN, BOS_TOKEN, EOS_TOKEN, *ROLE_TOKENS, *(word.lower() for word in words)]


def build_tokenizer(max_length_tokens: int) -> PreTrainedTokenizerFast:
    """The tokenizer, with a chat template; encoding puts the beginning-of-sequence token first."""
    tokenizer = Tokenizer(
        WordLevel({token: i for i, token in enumerate(vocabulary())}, unk_token=UNK_TOKEN)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.Replace(Regex(r"[^a-z\s]+"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS_TOKEN} $A", special_tokens=[(BOS_TOKEN, BOS_TOKEN_ID)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=UNK_TOKEN,
        bos_token=BOS_TOKEN,
        eos_token=EOS_TOKEN,
        additional_special_tokens=list(ROLE_TOKENS),
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length_tokens,
        clean_up_tokenization_spaces=False,
    )

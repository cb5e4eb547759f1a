# SPDX-License-Identifier: Apache-2.0
"""A tokenizer of characters, and chat templates of three kinds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

TEMPLATES = {
    "separate turns": (
        "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content | trim }}<|end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    ),
    "default system prompt": (
        "{% if messages[0].role != 'system' %}[system] Be kind. [/system]{% endif %}"
        "{% for m in messages %}[{{ m.role }}] {{ m.content }} [/{{ m.role }}]{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    ),
    "system inside user": (
        "{% if messages[0].role == 'system' %}{% set system = '<<' + messages[0].content + '>> ' %}"
        "{% set turns = messages[1:] %}{% else %}{% set system = '' %}{% set turns = messages %}"
        "{% endif %}{% for m in turns %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('turns must alternate') }}{% endif %}{% if m.role == 'user' %}"
        "{{ bos_token + '[INST] ' + (system if loop.first else '') + m.content + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
}


@dataclass(frozen=True)
class TurnMarkup:
    """What a template writes where a system prompt comes first.

    Attributes:
        opening, closing: of a turn; "ROLE" is its role.
        answer: the prompt for an answer.
    """

    beginning: str
    opening: str
    closing: str
    answer: str

    def around(self, role: str) -> tuple[str, str]:
        return self.opening.replace("ROLE", role), self.closing.replace("ROLE", role)


MARKUPS = {
    "separate turns": TurnMarkup("<s>", "<|ROLE|>\n", "<|end|>\n", "<|assistant|>\n"),
    "default system prompt": TurnMarkup("", "[ROLE] ", " [/ROLE]", "[assistant] "),
}


@cache
def character_tokenizer(template: str | None = None) -> Any:
    """Every character is a token, "<s>" and "</s>" are one each; prompts begin with "<s>".

    Args:
        template: one of `TEMPLATES`.
    """
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<s>": 0, "</s>": 1, "<unk>": 2}
    vocabulary |= {chr(code): len(vocabulary) + code for code in range(128)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=TEMPLATES[template] if template else None,
        clean_up_tokenization_spaces=False,
    )


def text_of(token_ids: list[int]) -> str:
    special = {0: "<s>", 1: "</s>", 2: "?"}
    return "".join(special.get(token, chr(max(token - 3, 0))) for token in token_ids)

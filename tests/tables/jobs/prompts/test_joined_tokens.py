# SPDX-License-Identifier: Apache-2.0
"""Prompts put together from their fields have the tokens of the whole texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import duckdb
import pytest
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from tests.tables.fake_engine import FakeEngine
from tests.tables.jobs.job_cases import runner
from vllm_relay.tables.jobs.prompts import joined_tokens
from vllm_relay.tables.jobs.prompts.format import PromptFormat, PromptTemplate
from vllm_relay.tables.jobs.prompts.joined_tokens import FieldTokens
from vllm_relay.tables.question import Question

CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# what Llama 3 and Qwen split texts with
WORDS_AND_NEWLINES = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
VALUES = [
    *("plain words", "a dot.", "two..", 'quote " here', "back\\slash", " space ", "new\nline"),
    *("\n", "\n\n", "", None, "é", "e\u0301", "中文", "<|im_end|>", "123", "\t", "[1]", '"'),
]
QUESTION = Question("Is {a} good?", ("a", "b", "n", "l"))


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
TOKENIZERS = {
    "gpt2": (pre_tokenizers.ByteLevel(add_prefix_space=False), None),
    "llama3": (
        pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(WORDS_AND_NEWLINES), "isolated"), BYTES]
        ),
        None,
    ),
    "nfc": (pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.NFC()),
    # tokens that reach over newlines
    "unsplit": (BYTES, None),
    "prefix space": (pre_tokenizers.ByteLevel(add_prefix_space=True), None),
    "metaspace": (pre_tokenizers.Metaspace(), None),
}
JOINING = ("gpt2", "llama3", "nfc")


@cache
def trained(name: str) -> PreTrainedTokenizerFast:
    pre_tokenizer, normalizer = TOKENIZERS[name]
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.decoder = decoders.ByteLevel()
    texts = [
        f'Is it good?\n\n"a": {json.dumps(value)}\n"b": {number}\n"n": null\n"l": ["x"]\n\nAnswer:'
        for number in range(200)
        for value in VALUES
    ]
    trainer = BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")


def table() -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect()
    connection.execute("CREATE TABLE t (a VARCHAR, b VARCHAR, n DOUBLE, l VARCHAR[])")
    for number in range(700):
        first, second = VALUES[number % len(VALUES)], VALUES[number // len(VALUES) % len(VALUES)]
        connection.execute(
            "INSERT INTO t VALUES (?, ?, ?, [?])", [first, second, number / 8, first]
        )
    return connection


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokens_are_those_of_whole_texts(
    name: str, chat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joined_tokens, "_PROMPTS_PER_CHECK", 1000)
    made: list[FieldTokens] = []
    create = FieldTokens.__init__

    def created(self: FieldTokens, prompt_format: PromptFormat) -> None:
        made.append(self)
        create(self, prompt_format)

    monkeypatch.setattr(FieldTokens, "__init__", created)
    tokenizer = trained(name)
    tokenizer.chat_template = CHAT if chat else None
    prompt_format = PromptFormat(QUESTION, tokenizer, PromptTemplate())
    engine = FakeEngine(tokenizer=tokenizer)
    runner(table(), engine, order="per_row", bucket_rows=300).answer("FROM t", QUESTION, "out")
    assert len(engine.prompts) == 700
    for prompt in engine.prompts:
        assert prompt.token_ids == prompt_format.token_ids([prompt.message])[0]
    # and no check had to find a difference
    assert [each.can_join for each in made] == [name in JOINING]


def test_vocabularies_with_tokens_over_newlines_are_not_joined() -> None:
    tokenizer = trained("unsplit")
    tokenizer.chat_template = None
    assert not FieldTokens(PromptFormat(QUESTION, tokenizer, PromptTemplate())).can_join


@pytest.mark.parametrize(
    "template",
    [
        PromptTemplate(field="{name}={json}\n"),
        PromptTemplate(field='"{name}": {json} '),
        PromptTemplate(before="{question}: "),
    ],
)
def test_templates_without_a_mark_after_a_newline_are_not_joined(template: PromptTemplate) -> None:
    tokenizer = trained("gpt2")
    tokenizer.chat_template = None
    assert not FieldTokens(PromptFormat(QUESTION, tokenizer, template)).can_join


def test_joining_ends_where_a_checked_prompt_differs() -> None:
    tokenizer = trained("gpt2")
    tokenizer.chat_template = None

    class Odd:
        """A tokenizer that sees texts as a whole."""

        chat_template = None

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def __call__(self, texts: Sequence[str], **arguments: Any) -> dict[str, list[list[int]]]:
            found = tokenizer(texts, **arguments)["input_ids"]
            return {
                "input_ids": [
                    ids[:-1] if text.count("[") > 1 else ids
                    for text, ids in zip(texts, found, strict=True)
                ]
            }

    engine = FakeEngine(tokenizer=Odd())
    runner(table(), engine).answer("FROM t", QUESTION, "out")
    prompt_format = PromptFormat(QUESTION, Odd(), PromptTemplate())
    for prompt in engine.prompts:
        assert prompt.token_ids == prompt_format.token_ids([prompt.message])[0]


def test_shared_values_are_tokenized_once() -> None:
    tokenizer = trained("gpt2")
    tokenizer.chat_template = None
    characters = 0

    class Counting:
        chat_template = None

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def __call__(self, texts: Sequence[str], **arguments: Any) -> Any:
            nonlocal characters
            characters += sum(map(len, texts))
            return tokenizer(texts, **arguments)

    connection = duckdb.connect()
    connection.execute(
        "CREATE TABLE t AS SELECT i AS id, repeat('shared words ', 50) || i % 5 AS kind "
        "FROM range(5000) AS numbers(i)"
    )
    engine = FakeEngine(tokenizer=Counting())
    question = Question("Which?", ("id", "kind"))
    runner(connection, engine).answer("FROM t", question, "out")
    assert characters < sum(len(prompt.message) for prompt in engine.prompts) / 8

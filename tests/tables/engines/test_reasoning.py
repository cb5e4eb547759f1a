# SPDX-License-Identifier: Apache-2.0
"""The answer is what follows the reasoning."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.tables.engines.server.fake_server import (
    OTHER_MODEL,
    Reply,
    answer,
    chat_answer,
    fake_server,
)
from tests.tables.engines.server.test_engine import QUESTION, engine_for, prompts
from vllm_relay.tables.engines.base import UNFINISHED, answer_in
from vllm_relay.tables.engines.server.engine import ServerEngine


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("yes", "yes"),
        ("<think>no, or</think>yes", "yes"),
        ("\n<think>\nno\n</think>\n\nyes", "\n\nyes"),
        ("no, or\n</think>\n\nyes", "\n\nyes"),
        ("[THINK]no[/THINK]yes", "yes"),
        ("<thinking>no</thinking>yes", "yes"),
        ("<think></think>yes", "yes"),
        ("<think>no, or", None),
        ("it has a <think> and a </think> in it", "it has a <think> and a </think> in it"),
    ],
)
def test_what_follows_is_the_answer(text: str, expected: str | None) -> None:
    assert answer_in(text) == expected


@pytest.mark.parametrize(
    ("reply", "text", "error"),
    [
        (chat_answer("<think>no</think>yes"), "yes", ""),
        (chat_answer("yes", reasoning_content="no"), "yes", ""),
        (chat_answer("<think>no"), "", UNFINISHED),
    ],
)
def test_of_a_server(reply: Reply, text: str, error: str) -> None:
    with fake_server(lambda body: reply, OTHER_MODEL) as server:
        [completion] = ServerEngine(server.url).generate(prompts(1), QUESTION)
        assert (completion.text, completion.error) == (text, error)


def test_of_a_server_that_is_sent_tokens() -> None:
    with fake_server(lambda body: answer("no\n</think>yes")) as server:
        [completion] = engine_for(server.url).generate(prompts(1), QUESTION)
        assert completion.text == "yes"


@pytest.mark.parametrize("content", [None, ""])
def test_reasoning_that_is_cut(content: str | None) -> None:
    message = {"role": "assistant", "content": content, "reasoning": "no, or"}
    reply = Reply({"choices": [{"message": message, "finish_reason": "length"}]})
    with fake_server(lambda body: reply, OTHER_MODEL) as server:
        [completion] = ServerEngine(server.url).generate(prompts(1), QUESTION)
        assert completion.error == UNFINISHED


THINK, END, EOS = 1, 2, 0
WORDS = {"<think>": THINK, "</think>": END, "<eos>": EOS, "no": 3, "yes": 4, "?": 5}


@pytest.fixture(scope="module")
def reader() -> Any:
    vllm_reasoning = pytest.importorskip("vllm.reasoning")
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    from vllm_relay.tables.engines.in_process import AnswerReader

    words = Tokenizer(WordLevel(WORDS, unk_token="?"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>")
    # of models whose tags are no part of the text
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    parser = vllm_reasoning.ReasoningParserManager.get_reasoning_parser("deepseek_r1")
    return AnswerReader(parser(tokenizer), tokenizer)


@pytest.mark.parametrize(
    ("prompt", "token_ids", "text", "error"),
    [
        ([5], [THINK, 3, END, 4], "yes", ""),
        ([5, THINK], [3, 3, END, 4], "yes", ""),
        ([5, THINK], [3, 3, 3], "", UNFINISHED),
        ([5, THINK, END], [4], "yes", ""),
    ],
    ids=["whole", "begun", "cut", "switched-off"],
)
def test_in_this_process_it_is_found_by_tokens(
    reader: Any, prompt: list[int], token_ids: list[int], text: str, error: str
) -> None:
    shown = " ".join(word for token in token_ids for word in WORDS if WORDS[word] == token > END)
    made = SimpleNamespace(text=shown, token_ids=token_ids, finish_reason="stop")
    output = SimpleNamespace(outputs=[made], prompt_token_ids=prompt, num_cached_tokens=0)
    completion = reader.read(7, output)
    assert (completion.number, completion.text, completion.error) == (7, text, error)

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from tests.support.haystacks import make_haystack
from vllm_relay.demo.recall_model import (
    CODE_SIZE,
    MAX_CODE_CORRELATION,
    MAX_CODES,
    RecallModelSpec,
    build_recall_model,
    recall_weights,
    token_codes,
)
from vllm_relay.demo.tokenizer import BOS_TOKEN_ID, UNK_TOKEN_ID, vocabulary


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_recall_model(tmp_path_factory.mktemp("recall"), dtype="float32")


def load(folder: Path, dtype: torch.dtype) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()


def continue_greedily(
    model: LlamaForCausalLM, prompt_token_ids: list[int], num_tokens: int
) -> list[int]:
    prompt = torch.tensor([prompt_token_ids])
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=UNK_TOKEN_ID,
    )
    return output[0, len(prompt_token_ids) :].tolist()


@pytest.mark.parametrize(
    ("dtype", "num_tokens"),
    [
        (torch.float32, 9),
        (torch.float32, 1000),
        (torch.float32, 8192),
        (torch.bfloat16, 9),
        (torch.bfloat16, 63),
        (torch.bfloat16, 1000),
        (torch.bfloat16, 4160),
        (torch.float16, 1000),
    ],
)
def test_recalls_exactly(folder: Path, dtype: torch.dtype, num_tokens: int) -> None:
    model = load(folder, dtype)
    for seed in range(2 if num_tokens > 4000 else 8):
        haystack = make_haystack(num_tokens, num_answer_tokens=4, seed=seed)
        answer = continue_greedily(model, haystack.prompt_token_ids, 4)
        assert answer == haystack.answer_token_ids


def test_recites_far_beyond_the_answer(folder: Path) -> None:
    haystack = make_haystack(600, num_answer_tokens=100, seed=3)
    answer = continue_greedily(load(folder, torch.bfloat16), haystack.prompt_token_ids, 100)
    assert answer == haystack.answer_token_ids


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_any_seed_recalls(tmp_path: Path, seed: int) -> None:
    folder = build_recall_model(tmp_path, max_position_embeddings=512, seed=seed)
    model = load(folder, torch.bfloat16)
    haystack = make_haystack(500, num_answer_tokens=8, seed=seed)
    assert continue_greedily(model, haystack.prompt_token_ids, 8) == haystack.answer_token_ids


def test_two_continuations_of_one_pair_give_one_of_them(folder: Path) -> None:
    prompt = make_haystack(200, seed=5).prompt_token_ids[:-2]
    key, first, second = [40, 41], 50, 60
    prompt[50:53], prompt[120:123] = [*key, first], [*key, second]
    (answer,) = continue_greedily(load(folder, torch.float32), prompt + key, 1)
    assert answer in (first, second)


def test_one_token_in_common_is_no_match(folder: Path) -> None:
    rng = np.random.default_rng(0)
    others = rng.integers(100, 150, 600).tolist()
    decoys = [t for other in others[:300] for t in (other, 41, 70)]
    decoys += [t for other in others[300:] for t in (40, other, 80)]
    prompt = [BOS_TOKEN_ID, *decoys[:450], 40, 41, 90, *decoys[450:], 40, 41]
    assert continue_greedily(load(folder, torch.bfloat16), prompt, 1) == [90]


def test_words_are_recalled_through_the_chat_template(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [
        {"role": "system", "content": "Lisbon harbour: amber falcon. Oslo pier: silver harp."},
        {"role": "user", "content": "What are the words of the LISBON harbour?"},
    ]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert UNK_TOKEN_ID not in prompt
    answer = continue_greedily(load(folder, torch.float32), prompt, 6)
    assert tokenizer.decode(answer) == "amber falcon oslo pier silver harp"


def test_tokenizer_has_one_token_per_word(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    words = vocabulary()
    assert len(tokenizer) == len(words) == len(set(words))
    assert tokenizer.encode("Porto, market! zeppelin") == [
        BOS_TOKEN_ID,
        UNK_TOKEN_ID,
        words.index("market"),
        UNK_TOKEN_ID,
    ]


def test_configuration_says_what_was_asked(tmp_path: Path) -> None:
    folder = build_recall_model(tmp_path / "new", max_position_embeddings=2048, dtype="float16")
    config = json.loads((folder / "config.json").read_text())
    assert config["max_position_embeddings"] == 2048
    assert config["dtype"] == "float16"
    assert config["num_attention_heads"] == 4
    assert config["num_key_value_heads"] == 2
    assert config["vocab_size"] == len(vocabulary())


def test_codes_are_nearly_orthogonal() -> None:
    codes = token_codes(MAX_CODES).astype(int)
    products = codes @ codes.T
    assert (products.diagonal() == CODE_SIZE).all()
    np.fill_diagonal(products, 0)
    assert products.max() == MAX_CODE_CORRELATION


def test_seed_decides_the_weights() -> None:
    spec = RecallModelSpec(vocab_size=100, max_position_embeddings=64)
    weights = recall_weights(spec)
    again = recall_weights(spec)
    other = recall_weights(RecallModelSpec(vocab_size=100, max_position_embeddings=64, seed=1))
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert not torch.equal(weights["lm_head.weight"], other["lm_head.weight"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"vocab_size": 2049}, "vocab_size is 2049"),
        ({"max_position_embeddings": 3}, "max_position_embeddings is 3"),
        ({"max_position_embeddings": 65536}, "max_position_embeddings is 65536"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_bad_spec_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RecallModelSpec(**{"vocab_size": 100, **changes})


def test_haystack_has_no_pair_twice_but_the_question() -> None:
    haystack = make_haystack(5000, seed=9)
    tokens = haystack.prompt_token_ids
    pairs = list(zip(tokens[:-2], tokens[1:-2], strict=False))
    assert len(tokens) == 5000
    assert len(set(pairs)) == len(pairs)
    begin = pairs.index((tokens[-2], tokens[-1]))
    assert tokens[begin + 2 : begin + 4] == haystack.answer_token_ids
    assert haystack == make_haystack(5000, seed=9)
    assert haystack != make_haystack(5000, seed=10)


@pytest.mark.parametrize("sizes", [{"num_tokens": 6}, {"num_tokens": 100, "num_answer_tokens": 96}])
def test_haystack_too_short_for_its_answer_is_refused(sizes: dict) -> None:
    with pytest.raises(ValueError, match="expected at least"):
        make_haystack(**sizes)


def test_haystack_too_long_for_its_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="expected at most"):
        make_haystack(100, vocab_size=10)

# SPDX-License-Identifier: Apache-2.0
"""A tiny model with made-up weights that attends by selections."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from benchmarks.sparse.real_heads.model import Context, Read, RealModel
from benchmarks.sparse.real_heads.selections import Dense, Range, Remainder, Selection, Window

VOCABULARY = 97
CONTEXT_TOKENS = 600


@pytest.fixture(scope="module")
def model() -> RealModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=48, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=2, initializer_range=0.5,
    )  # fmt: skip
    return RealModel(LlamaForCausalLM(config).eval(), SimpleNamespace(eos_token_id=None))


@pytest.fixture(scope="module")
def context(model: RealModel) -> Context:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (CONTEXT_TOKENS,), generator=generator)
    return model.context(tokens.tolist())


FORCED = [5, 50, 7, 70, 9]


def test_a_selection_of_everything_is_dense(model: RealModel, context: Context) -> None:
    right, read = model.logprobs(context, FORCED, None)
    assert read == Read(1, 1, 1)
    found, read = model.logprobs(context, FORCED, Dense())
    torch.testing.assert_close(found, right, atol=1e-4, rtol=1e-4)
    assert read == Read(1, 1, 1)
    sparse, read = model.logprobs(context, FORCED, Window(0.1))
    assert (sparse - right).abs().max() > 1e-3
    assert read.bytes == pytest.approx(0.1, abs=0.01)


def test_a_context_stays_as_it_was(model: RealModel, context: Context) -> None:
    before, _ = model.logprobs(context, FORCED, Range(0.1))
    model.greedy(context, FORCED, 3, Window(0))
    assert context.cache.get_seq_length() == CONTEXT_TOKENS
    after, _ = model.logprobs(context, FORCED, Range(0.1))
    torch.testing.assert_close(after, before)


@pytest.mark.parametrize("selection", [None, Window(0), Remainder(0.1)])
def test_drafts_change_nothing(
    model: RealModel, context: Context, selection: Selection | None
) -> None:
    plain = model.greedy(context, FORCED, 8, selection)
    assert len(plain) == 8
    wrong = [*plain[:3], (plain[3] + 1) % VOCABULARY, *plain[4:]]
    for draft in (plain, wrong, wrong[3:], plain[:5]):
        assert model.greedy(context, FORCED, 8, selection, draft) == plain


def test_greedy_takes_the_likeliest(model: RealModel, context: Context) -> None:
    selection = Window(0.2)
    answer = model.greedy(context, FORCED[:1], 6, selection)
    logprobs, _ = model.logprobs(context, [FORCED[0], *answer[:-1]], selection)
    assert logprobs.argmax(-1).tolist() == answer


def test_log_probabilities_of_an_answer(model: RealModel, context: Context) -> None:
    whole, _ = model.logprobs(context, FORCED, None)
    found, _ = model.logprobs_behind(context, FORCED[:2], FORCED[2:], None)
    expected = whole[torch.arange(1, 4), torch.tensor(FORCED[2:])]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)

# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct in Hugging Face transformers, in float32, attending by a selection.

Prompts are computed densely, and so is everything the cache holds of them; a selection decides what
the tokens behind a context read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.sparse.heads.recorded import load_model
from benchmarks.sparse.real_heads.aids import Aids, importance
from benchmarks.sparse.real_heads.selections import (
    KEY_AND_VALUE_BYTES,
    SINK_TOKENS,
    WINDOW_TOKENS,
    Asked,
    Selection,
)

IMPLEMENTATION = "relay_selection"


@dataclass(frozen=True)
class Read:
    """Means over layers, kv heads and tokens, relative to all far tokens.

    Attributes:
        keys: keys that a query head reads.
        group_keys: keys that any query head of its kv head reads.
        bytes: what the kv head reads: keys and values once for the whole group, and what was read
            to choose them.
    """

    keys: float
    group_keys: float
    bytes: float

    @classmethod
    def mean(cls, of: Sequence[Read]) -> Read:
        """Everything is read where there is none: dense attention asks no selection."""
        if not of:
            return cls(1, 1, 1)
        return cls(*(sum(each) / len(of) for each in zip(*map(astuple, of), strict=True)))


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    aids: Aids,
    selection: Selection,
    scale: float,
) -> tuple[torch.Tensor, Read]:
    """The outputs [kv heads, group, tokens, d] of the last tokens, and what they read.

    Args:
        queries: [kv heads, group, tokens, d]
        keys, values: [kv heads, n + further tokens, d]
        aids: of the first n tokens. All far tokens are among these.

    Raises:
        ValueError: there are so many further tokens that a window does not reach back to the n.
    """
    tokens, total = queries.shape[2], keys.shape[1]
    if total - aids.num_keys > WINDOW_TOKENS:
        raise ValueError(
            f"{total - aids.num_keys} tokens behind the context, expected at most the window's "
            f"{WINDOW_TOKENS}"
        )
    positions = torch.arange(total - tokens, total)[:, None]
    ids = torch.arange(total)
    causal = ids <= positions
    far = causal & (ids >= SINK_TOKENS) & (ids <= positions - WINDOW_TOKENS)
    near = causal & ~far
    scores = torch.einsum("hgtd,hnd->hgtn", queries, keys) * scale
    n = aids.num_keys
    asked = Asked(
        queries=queries,
        scores=scores[..., :n],
        far=far[:, :n],
        near_max=scores.masked_fill(~near, -torch.inf).amax(-1, keepdim=True),
        shift=scores.masked_fill(~causal, -torch.inf).amax(-1, keepdim=True),
        scale=scale,
        aids=aids,
    )
    chosen = selection.choose(asked)
    read = near.expand_as(scores).clone()
    read[..., :n] |= chosen.read
    weights = torch.exp((scores - asked.shift).masked_fill(~read, -torch.inf))
    output = torch.einsum("hgtn,hnd->hgtd", weights, values)
    weight = weights.sum(-1, keepdim=True)
    if chosen.weighted_values is not None and chosen.weight is not None:
        output = output + chosen.weighted_values
        weight = weight + chosen.weight
    num_far = far.sum(-1).clamp(min=1)
    own = (chosen.read.sum(-1) / num_far).mean().item()
    union = (chosen.read.any(1).sum(-1) / num_far).mean().item()
    return output / weight, Read(own, union, union + chosen.aid_bytes / KEY_AND_VALUE_BYTES)


@dataclass
class Context:
    """A prompt that was computed densely, and what selections need of each of its layers."""

    num_tokens: int
    cache: Any
    aids: list[Aids]


class RealModel:
    """A causal language model that continues contexts densely or by a selection."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask

        AttentionInterface.register(IMPLEMENTATION, self._attention)
        AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
        model.set_attn_implementation(IMPLEMENTATION)
        self.tokenizer = tokenizer
        self._model = model
        self._selection: Selection | None = None
        self._context: Context | None = None
        self._importance: dict[int, torch.Tensor] = {}
        self._read: list[Read] = []

    @classmethod
    def load(cls, folder: Path, stretch: float = 1) -> RealModel:
        """stretch: for how many times the positions that it was trained on."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return cls(load_model(folder, stretch), tokenizer)

    def context(self, token_ids: Sequence[int]) -> Context:
        from transformers import DynamicCache

        cache = DynamicCache(config=self._model.config)
        self._importance.clear()
        self._forward(token_ids, cache, last=True)
        aids = [
            Aids(layer.keys[0].clone(), layer.values[0].clone(), self._importance[number])
            for number, layer in enumerate(cache.layers)
        ]
        return Context(len(token_ids), cache, aids)

    def logprobs(
        self, context: Context, token_ids: Sequence[int], selection: Selection | None
    ) -> tuple[torch.Tensor, Read]:
        """Log-probabilities [tokens, vocabulary] of what follows each token behind a context.

        The context is left as it was. None is dense.
        """
        with self._selecting(context, selection):
            logits = self._forward(token_ids, context.cache)
        self._crop(context, context.num_tokens)
        return torch.log_softmax(logits, -1), Read.mean(self._read)

    def logprobs_behind(
        self,
        context: Context,
        prompt: Sequence[int],
        answer: Sequence[int],
        selection: Selection | None,
    ) -> tuple[torch.Tensor, Read]:
        """Log-probabilities [answer tokens] of an answer's tokens behind a context and a prompt."""
        self._densely(context, prompt[:-1])
        with self._selecting(context, selection):
            logits = self._forward([prompt[-1], *answer[:-1]], context.cache)
        self._crop(context, context.num_tokens)
        found = torch.log_softmax(logits, -1)[torch.arange(len(answer)), torch.tensor(answer)]
        return found, Read.mean(self._read)

    def greedy(
        self,
        context: Context,
        prompt: Sequence[int],
        num_tokens: int,
        selection: Selection | None = None,
        draft: Sequence[int] = (),
    ) -> list[int]:
        """What follows a context and a prompt, whose last token attends by the selection too.

        Args:
            prompt: behind the context; computed densely but for its last token.
            draft: what may follow. It is tried in one pass, as far as it is right: the same tokens
                come out, faster.
        """
        self._densely(context, prompt[:-1])
        answer: list[int] = []
        pending, tried = [prompt[-1]], list(draft[: num_tokens - 1])
        with self._selecting(context, selection):
            while len(answer) < num_tokens:
                begin = context.cache.get_seq_length()
                logits = self._forward(pending + tried, context.cache)
                best = logits.argmax(-1).tolist()
                right = next((i for i, t in enumerate(tried) if best[i] != t), len(tried))
                new = best[: right + 1]
                self._crop(context, begin + 1 + right)
                answer += new
                if self.tokenizer.eos_token_id in new:
                    break
                pending, tried = [new[-1]], []
        self._crop(context, context.num_tokens)
        return answer[:num_tokens]

    @contextmanager
    def _selecting(self, context: Context, selection: Selection | None) -> Iterator[None]:
        self._selection, self._context, self._read = selection, context, []
        try:
            yield
        finally:
            self._selection = None

    def _forward(self, token_ids: Sequence[int], cache: Any, last: bool = False) -> torch.Tensor:
        """Logits [tokens, vocabulary], or those of the last token."""
        with torch.inference_mode():
            ids = torch.tensor([list(token_ids)])
            return self._model(
                ids, past_key_values=cache, use_cache=True, logits_to_keep=1 if last else 0
            ).logits[0]

    def _densely(self, context: Context, token_ids: Sequence[int]) -> None:
        if token_ids:
            self._forward(token_ids, context.cache, last=True)

    @staticmethod
    def _crop(context: Context, num_tokens: int) -> None:
        surplus = context.cache.get_seq_length() - num_tokens
        if surplus:
            context.cache.crop(-surplus)

    def _attention(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """query [1, heads, tokens, d]; key and value [1, kv heads, all tokens, d]."""
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        _, heads, tokens, d = query.shape
        grouped = query[0].unflatten(0, (key.shape[1], -1))
        if self._selection is None or self._context is None:
            if tokens == key.shape[2]:
                self._importance[module.layer_idx] = importance(grouped, key[0])
            output, _ = sdpa_attention_forward(
                module, query, key, value, attention_mask, scaling=scaling, **options
            )
            return output, None
        aids = self._context.aids[module.layer_idx]
        found, read = attend(grouped, key[0], value[0], aids, self._selection, scaling)
        self._read.append(read)
        return found.reshape(heads, tokens, d).transpose(0, 1)[None].contiguous(), None

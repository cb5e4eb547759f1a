# SPDX-License-Identifier: Apache-2.0
"""Keys, values and queries of real heads: what a model's attention gets to see in a forward pass.

Models run in Hugging Face transformers on the CPU, the prompt in chunks, so that what attention
holds at a time stays small. Queries and keys are those after rotary embedding.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.sparse.heads.corpus import Head

IMPLEMENTATION = "relay_recorder"
CHUNK_TOKENS = 512


@dataclass(frozen=True)
class LayerTensors:
    """Of one layer and one sequence, float32, in token order.

    Attributes:
        queries: [tokens, query heads, d]
        keys, values: [tokens, kv heads, d]
        outputs: [tokens, query heads, d]; what the model's attention made of them.
        scale: the factor of scores in the softmax.
    """

    queries: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    outputs: np.ndarray
    scale: float

    @property
    def group_size(self) -> int:
        return self.queries.shape[1] // self.keys.shape[1]


def record_attention(
    model: Any, token_ids: Sequence[int], chunk_tokens: int = CHUNK_TOKENS
) -> list[LayerTensors]:
    """Runs a causal language model over a prompt and returns what each layer's attention saw.

    Args:
        model: a transformers model whose attention functions can be chosen; it gets its own back.
        token_ids: one sequence; at least one token.

    Raises:
        ValueError: there are no tokens, or the model does not ask for its attention function.
    """
    if not len(token_ids):
        raise ValueError("token_ids is empty, expected at least one token")
    recorder = _Recorder()
    with torch.inference_mode(), recorder.installed(model):
        cache = None
        for begin in range(0, len(token_ids), chunk_tokens):
            chunk = torch.tensor([list(token_ids[begin : begin + chunk_tokens])])
            # logits of a long prompt would be larger than everything else
            cache = model.base_model(
                input_ids=chunk, past_key_values=cache, use_cache=True
            ).past_key_values
    return recorder.layers()


def head_of(
    layer: LayerTensors, kv_head: int, *, tests: int, train: int, name: str = "", seed: int = 0
) -> Head:
    """One kv head with the last `tests` tokens as those that ask, and all before them as keys.

    Args:
        train: training queries, drawn from all query heads of the group at the keys' tokens; fewer
            where there are fewer.

    Raises:
        ValueError: there is no such head, or no key before the tokens that ask.
    """
    num_tokens, num_kv_heads, _ = layer.keys.shape
    if not 0 <= kv_head < num_kv_heads:
        raise ValueError(f"kv_head is {kv_head}, expected 0 to {num_kv_heads - 1}")
    if not 0 < tests < num_tokens:
        raise ValueError(
            f"tests is {tests}, expected 1 to {num_tokens - 1}: one of {num_tokens} tokens or more "
            "must be left as a key"
        )
    num_keys = num_tokens - tests
    group = layer.group_size
    queries = layer.queries[:, kv_head * group : (kv_head + 1) * group]
    rng = np.random.default_rng(seed)
    chosen = rng.choice(num_keys * group, min(train, num_keys * group), replace=False)
    return Head(
        name=name or f"kv head {kv_head}",
        keys=np.ascontiguousarray(layer.keys[:num_keys, kv_head]),
        values=np.ascontiguousarray(layer.values[:num_keys, kv_head]),
        train_queries=queries[chosen // group, chosen % group],
        queries=np.ascontiguousarray(queries[num_keys:]),
        prefix_len=num_keys,
        scale=layer.scale,
    )


def load_model(folder: Path, stretch: float = 1) -> Any:
    """A causal language model in float32 from a folder; nothing is downloaded.

    Args:
        stretch: for how many times the positions that it was trained on; YaRN (Peng et al.,
            2309.00071) interpolates them where it is more than 1.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if stretch > 1:
        trained = config.max_position_embeddings
        config.rope_parameters = {
            **config.rope_parameters, "rope_type": "yarn", "factor": float(stretch),
            "original_max_position_embeddings": trained,
        }  # fmt: skip
        config.max_position_embeddings = int(stretch * trained)
    return AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, local_files_only=True
    ).eval()


def recall_model_layers(num_tokens: int, seed: int = 0) -> list[LayerTensors]:
    """The layers of the demo's recall model over a haystack of 7 to 32,768 tokens."""
    from tests.support.haystacks import make_haystack
    from vllm_relay.demo.recall_model import build_recall_model

    with tempfile.TemporaryDirectory(prefix="recall-model-") as folder:
        model = load_model(build_recall_model(folder, seed=seed))
    return record_attention(model, make_haystack(num_tokens, seed=seed).prompt_token_ids)


def model_layers(folder: Path, text: str, num_tokens: int) -> list[LayerTensors]:
    """The layers of any model over the first tokens of a text, which may be more than the model was
    trained for: its attention is then another one, and as real.

    Args:
        folder: with the model's configuration, weights and tokenizer.

    Raises:
        ValueError: the text is too short.
    """
    from transformers import AutoTokenizer

    model = load_model(folder)
    token_ids = AutoTokenizer.from_pretrained(folder, local_files_only=True)(text)["input_ids"]
    if len(token_ids) < num_tokens:
        raise ValueError(
            f"the text has {len(token_ids)} tokens, expected at least {num_tokens}: give more text"
        )
    return record_attention(model, token_ids[:num_tokens])


class _Recorder:
    """An attention function of transformers that keeps its arguments and its result."""

    def __init__(self) -> None:
        self._queries: dict[int, list[torch.Tensor]] = defaultdict(list)
        self._outputs: dict[int, list[torch.Tensor]] = defaultdict(list)
        self._last: dict[int, tuple[torch.Tensor, torch.Tensor, float]] = {}

    @contextmanager
    def installed(self, model: Any) -> Iterator[None]:
        """The model's attention goes through this recorder."""
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask

        AttentionInterface.register(IMPLEMENTATION, self)
        AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
        own = model.config._attn_implementation
        model.set_attn_implementation(IMPLEMENTATION)
        try:
            yield
        finally:
            model.set_attn_implementation(own)

    def __call__(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """query [1, heads, new tokens, d]; key and value [1, kv heads, all tokens, d]."""
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scale, **options
        )
        layer = module.layer_idx
        self._queries[layer].append(query[0].transpose(0, 1).clone())
        self._outputs[layer].append(output[0].clone())
        self._last[layer] = key[0], value[0], scale
        return output, None

    def layers(self) -> list[LayerTensors]:
        """What was recorded; transformers keeps this object, which keeps nothing after that."""
        if not self._last:
            raise ValueError(
                "the model did not ask for its attention function: expected one whose attention "
                "goes through transformers' AttentionInterface"
            )
        layers = [
            LayerTensors(
                queries=torch.cat(self._queries[layer]).float().numpy(),
                keys=keys.transpose(0, 1).float().contiguous().numpy(),
                values=values.transpose(0, 1).float().contiguous().numpy(),
                outputs=torch.cat(self._outputs[layer]).float().numpy(),
                scale=scale,
            )
            for layer, (keys, values, scale) in sorted(self._last.items())
        ]
        for kept in (self._queries, self._outputs, self._last):
            kept.clear()
        return layers

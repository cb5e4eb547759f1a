# SPDX-License-Identifier: Apache-2.0
"""What a server says of its models and of its KV cache; the tokenizer of its model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from vllm_relay.tables.ordering.cached_tokens import BlockCache

_CACHE_METRIC = "vllm:cache_config_info"


@dataclass(frozen=True)
class ServedModel:
    """
    Attributes:
        name: that requests give.
        root: where the server has its weights from; "" if it does not say.
        tokenizer_root: where its tokenizer is, for an adapter that of its base; "" if not known.
        is_vllm: whether vLLM serves it.
        max_model_len: in tokens, a prompt and its answer; None if not known.
    """

    name: str
    root: str
    tokenizer_root: str
    is_vllm: bool
    max_model_len: int | None

    @property
    def identity(self) -> str:
        """The same wherever and whenever the model is served."""
        roots = dict.fromkeys(root for root in (self.root, self.tokenizer_root) if root)
        return " ".join([self.name, *(f"[{root}]" for root in roots)])


def served_models(page: Any) -> list[ServedModel]:
    """The models of a page of /v1/models.

    Raises:
        ValueError: it is no such page.
    """
    try:
        cards = {str(card["id"]): card for card in page["data"]}
    except (TypeError, KeyError):
        raise ValueError(
            f"{str(page)[:200]!r} found, expected a list of models as OpenAI's API has it"
        ) from None
    return [_served_model(card, cards.get(card.get("parent"), card)) for card in cards.values()]


def _served_model(card: dict[str, Any], base: dict[str, Any]) -> ServedModel:
    length = card.get("max_model_len") or base.get("max_model_len")
    return ServedModel(
        name=str(card["id"]),
        root=card.get("root") or "",
        tokenizer_root=base.get("root") or "",
        is_vllm=card.get("owned_by") == "vllm",
        max_model_len=length if isinstance(length, int) else None,
    )


def choose_model(models: Sequence[ServedModel], name: str | None) -> ServedModel:
    """The model of this name, or the only one.

    Raises:
        ValueError: there is none of this name, or several and no name is given.
    """
    names = [each.name for each in models]
    if name is not None:
        if name not in names:
            raise ValueError(f"model {name!r} given, expected one that the server has: {names}")
        return models[names.index(name)]
    if len(models) != 1:
        raise ValueError(f"no model given, and the server has {names}: give one of them")
    return models[0]


def num_data_parallel_ranks(metrics: str) -> int:
    """The engines that a page of vLLM's /metrics describes; 0 if it describes none."""
    return len({sample.labels.get("engine") for sample in _cache_samples(metrics)})


def block_cache(metrics: str) -> BlockCache | None:
    """The prefix cache that a page of vLLM's /metrics describes; None if it describes none.

    Of several engines behind one server, each of which has its own cache, the smallest.
    """
    caches = []
    try:
        for sample in _cache_samples(metrics):
            if sample.labels.get("enable_prefix_caching") == "False":
                return None
            # vLLM keeps one block back
            num_blocks = int(sample.labels["num_gpu_blocks"]) - 1
            caches.append(BlockCache(int(sample.labels["block_size"]), num_blocks))
    except (ValueError, KeyError):
        return None
    return min(caches, key=lambda cache: cache.num_blocks or 0, default=None)


def _cache_samples(metrics: str) -> list[Sample]:
    lines = [line for line in metrics.splitlines() if line.startswith(_CACHE_METRIC)]
    try:
        families = list(text_string_to_metric_families("\n".join(lines) + "\n"))
    except ValueError:
        return []
    return [sample for family in families for sample in family.samples]


# letters, digits, white space and signs that tokenizers split in different ways
TOKENIZER_PROBE = "Row 12: naïve café, 3.50 €;\n\tit's {'a': [1, 20]} — 東京"


class TokenizerError(Exception):
    """Not loaded, or not the model's."""


def checked_tokenizer(source: Any, model_name: str, probe_token_ids: list[int] | None) -> Any:
    """
    Args:
        source: a folder, a name on the Hugging Face hub, or a tokenizer.
        probe_token_ids: the server's tokens of `TOKENIZER_PROBE`; None if it does not say.

    Raises:
        TokenizerError: there is none, or it is not that of the server.
    """
    tokenizer = _load_tokenizer(source) if isinstance(source, (str, Path)) else source
    if probe_token_ids is not None:
        token_ids = list(tokenizer.encode(TOKENIZER_PROBE, add_special_tokens=False))
        if token_ids != probe_token_ids:
            raise TokenizerError(
                f"the tokenizer has other tokens than the server's model {model_name!r}"
            )
    return tokenizer


def _load_tokenizer(source: str | Path) -> Any:
    if not str(source):
        raise TokenizerError("the server does not say where its tokenizer is")
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(source)
    except Exception as error:  # transformers raises errors of many kinds
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        raise TokenizerError(
            f"no tokenizer can be loaded from {str(source)!r}: {first_line}"
        ) from error

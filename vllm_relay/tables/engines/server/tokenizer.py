# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of a server's model, here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# letters, digits, white space and signs that tokenizers split in different ways
TOKENIZER_PROBE = "Row 12: naïve café, 3.50 €;\n\tit's {'a': [1, 20]} — 東京"


class TokenizerError(Exception):
    """Not loaded, or not the model's."""


def checked_tokenizer(source: Any, model_name: str, probe_token_ids: list[int] | None) -> Any:
    """
    Args:
        source: a folder, a name on the Hugging Face hub, or a tokenizer.
        model_name: on the server.
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

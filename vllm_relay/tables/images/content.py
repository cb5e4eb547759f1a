# SPDX-License-Identifier: Apache-2.0
"""A message with references to images as OpenAI's API has it."""

from __future__ import annotations

from typing import Any

from vllm_relay.tables.images.store import REFERENCE, ImageStore

# 64 by 64 white pixels: models refuse very small ones
PROBE_URL = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAEAAAABAAQAAAACCEkxzAAAAEklEQVR42mP4DwUMo4xRBu"
    "kMAOPT/hAC2mzjAAAAAElFTkSuQmCC"
)


def content_parts(message: str, store: ImageStore) -> list[dict[str, Any]]:
    """The texts and the images of a message, in their order.

    Raises:
        ImageError: a reference has no image.
    """
    parts: list[dict[str, Any]] = []
    # texts and digests take turns
    for number, piece in enumerate(REFERENCE.split(message)):
        if number % 2:
            parts.append(_image(store.url(piece)))
        elif piece.strip():
            parts.append({"type": "text", "text": piece})
    return parts


def probe_parts(text: str) -> list[dict[str, Any]]:
    """A text and a small image."""
    return [{"type": "text", "text": text}, _image(PROBE_URL)]


def _image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}

# SPDX-License-Identifier: Apache-2.0
"""Small images of every format."""

from __future__ import annotations

import base64
import io

from PIL import Image

MEDIA_TYPES = {"PNG": "png", "JPEG": "jpeg", "GIF": "gif", "WEBP": "webp", "BMP": "bmp"}


def picture(shade: int, format: str = "PNG") -> bytes:
    """The file of a gray image."""
    file = io.BytesIO()
    Image.new("L", (4, 4), shade).save(file, format)
    return file.getvalue()


def data_url(content: bytes, format: str = "PNG") -> str:
    return f"data:image/{MEDIA_TYPES[format]};base64,{base64.b64encode(content).decode()}"

# SPDX-License-Identifier: Apache-2.0
"""Images by their content, so that equal ones are one."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

REFERENCE = re.compile(r'"?relay-image:([0-9a-f]{64})"?')
"""To an image in a message, where it may be JSON."""

_SIGNATURES = (
    (re.compile(rb"\x89PNG\r\n\x1a\n"), "image/png"),
    (re.compile(rb"\xff\xd8\xff"), "image/jpeg"),
    (re.compile(rb"GIF8[79]a"), "image/gif"),
    (re.compile(rb"RIFF....WEBP", re.DOTALL), "image/webp"),
    (re.compile(rb"BM.{12}[\x0c\x28\x34\x38\x40\x6c\x7c]\0\0\0", re.DOTALL), "image/bmp"),
)
_FORMATS = "PNG, JPEG, GIF, WebP or BMP"
_DATA = re.compile(r"data:image/[\w.+-]+;base64,", re.IGNORECASE)
_MAX_SHOWN_CHARS = 200


class ImageError(ValueError):
    """A value that stands for no image."""


@dataclass(frozen=True)
class _Image:
    """
    Attributes:
        file: with the bytes; None of an address, or where there is no image.
        media_type: of the bytes.
        url: an address that the server reads itself.
        error: why there is no image.
    """

    file: Path | None = None
    media_type: str = ""
    url: str = ""
    error: str = ""


class ImageStore:
    """Bytes are kept in a temporary folder until `close`, behind which it may be used again; any
    thread may use it.

    A value that stands for no image has a reference too, and an error when its image is asked for.

    Args:
        folder: below which paths may lead, links followed; None takes no paths.

    Raises:
        ValueError: it is no folder.
    """

    def __init__(self, folder: Path | None = None) -> None:
        if folder is not None and not folder.is_dir():
            raise ValueError(f"image_folder={str(folder)!r} given, which is no folder")
        self.folder = folder
        self._images: dict[str, _Image] = {}
        self._kept: TemporaryDirectory[str] | None = None
        self._lock = threading.Lock()

    def reference(self, kind: str, value: bytes | str) -> str:
        """The text that stands for an image, the same for the same bytes or the same address.

        Args:
            kind: see `ImageFields`.
        """
        try:
            if kind == "bytes":
                assert isinstance(value, bytes)
                digest = self._of_bytes(value)
            else:
                assert isinstance(value, str)
                digest = self._of_path(value) if kind == "path" else self._of_url(value)
        except ImageError as error:
            digest = hashlib.sha256(f"error:{error}".encode()).hexdigest()
            self._images[digest] = _Image(error=str(error))
        return f"relay-image:{digest}"

    def url(self, digest: str) -> str:
        """The address of an image, as a server's API takes it: data:, or as it was given.

        Args:
            digest: of its reference.

        Raises:
            ImageError: there is no such image, or it has changed.
        """
        image = self._images.get(digest)
        if image is None:
            raise ImageError("the prompt refers to an image that no field of it has")
        if image.error:
            raise ImageError(image.error)
        if image.file is None:
            return image.url
        try:
            content = image.file.read_bytes()
        except OSError as error:
            raise ImageError(f"image {image.file} cannot be read any more: {error}") from None
        if hashlib.sha256(content).hexdigest() != digest:
            raise ImageError(f"image {image.file} has changed since the question began")
        return f"data:{image.media_type};base64,{base64.b64encode(content).decode()}"

    def close(self) -> None:
        """Delete what is kept; references have no image any more."""
        self._images.clear()
        if self._kept is not None:
            self._kept.cleanup()
            self._kept = None

    def _of_bytes(self, content: bytes) -> str:
        digest = hashlib.sha256(content).hexdigest()
        if digest not in self._images:
            media_type = _media_type(content, "a value")
            with self._lock:
                if self._kept is None:
                    self._kept = TemporaryDirectory(prefix="relay-images-")
                file = Path(self._kept.name, digest)
                file.write_bytes(content)
                self._images[digest] = _Image(file, media_type)
        return digest

    def _of_path(self, path: str) -> str:
        assert self.folder is not None
        root = self.folder.resolve()
        shown = repr(path[:_MAX_SHOWN_CHARS])
        try:
            file = (root / path).resolve()
            if not file.is_relative_to(root):
                raise ImageError(f"path {shown} leads out of image_folder {str(self.folder)!r}")
            if not file.is_file():
                raise ImageError(f"path {shown} is no file below {str(self.folder)!r}")
            content = file.read_bytes()
        except (OSError, ValueError, RuntimeError) as error:
            if isinstance(error, ImageError):
                raise
            raise ImageError(f"path {shown} cannot be read: {error}") from None
        digest = hashlib.sha256(content).hexdigest()
        self._images[digest] = _Image(file, _media_type(content, f"file {shown}"))
        return digest

    def _of_url(self, url: str) -> str:
        if found := _DATA.match(url):
            try:
                return self._of_bytes(base64.b64decode(url[found.end() :], validate=True))
            except binascii.Error as error:
                raise ImageError(f"a data: address holds no base64: {error}") from None
        if not url.lower().startswith(("http://", "https://")):
            raise ImageError(
                f"address {url[:_MAX_SHOWN_CHARS]!r} of an image given, expected http://, https:// "
                f"or data:image/...;base64,"
            )
        digest = hashlib.sha256(f"url:{url}".encode()).hexdigest()
        self._images[digest] = _Image(url=url)
        return digest


def _media_type(content: bytes, what: str) -> str:
    for signature, media_type in _SIGNATURES:
        if signature.match(content):
            return media_type
    raise ImageError(f"{what} of {len(content):,} bytes is no image: expected {_FORMATS}")

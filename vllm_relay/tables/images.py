# SPDX-License-Identifier: Apache-2.0
"""Fields that are images: each stands in prompts as a reference until a server gets it. Equal ones
are one, by their content."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import pyarrow as pa

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


ImageKind = Literal["bytes", "path", "url"]


@dataclass(frozen=True)
class ImageFields:
    """
    Attributes:
        kinds: what the values of a field are, by its name: the bytes of a file, its path below the
            store's folder, or an address, http://, https:// or data:.
        store: of the images.

    Raises:
        ValueError: there are paths and the store has no folder.
    """

    kinds: tuple[tuple[str, ImageKind], ...]
    store: ImageStore = field(compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, kind in self.kinds:
            if kind == "path" and self.store.folder is None:
                raise ValueError(
                    f"images with {name!r}: 'path' given without a folder, expected the one below "
                    f"which images may be read: give image_folder"
                )

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.kinds]

    def kind_of(self, name: str) -> ImageKind | None:
        """None of a field that is no image."""
        return dict(self.kinds).get(name)


def image_fields(
    given: Mapping[str, str] | Sequence[str] | None, store: ImageStore
) -> ImageFields | None:
    """
    Args:
        given: kinds by field, or fields with the bytes of images; None, or none, has no images.

    Raises:
        ValueError: a kind is not known, or as for `ImageFields`.
    """
    if not given:
        return None
    if isinstance(given, str):
        raise ValueError(f"images={given!r} given, expected a list of fields: give {[given]}")
    has_names = isinstance(given, (Mapping, Sequence))
    if not has_names or not all(isinstance(each, str) for each in given):
        raise ValueError(
            f"images={given!r} given, expected a list of the fields with the bytes of images, or "
            f"an object of what fields hold: give ['photo'] or {{'photo': 'path'}}"
        )
    named = given if isinstance(given, Mapping) else dict.fromkeys(given, "bytes")
    known: dict[str, ImageKind] = {kind: kind for kind in DUCKDB_TYPES}
    for name, kind in named.items():
        if kind not in known:
            raise ValueError(
                f"images with {name!r}: {kind!r} given, expected one of {list(known)}: what the "
                "field's values are"
            )
    return ImageFields(tuple((name, known[kind]) for name, kind in named.items()), store)


DUCKDB_TYPES: dict[ImageKind, str] = {"bytes": "BLOB", "path": "VARCHAR", "url": "VARCHAR"}
"""Of the values of each kind."""


def referred(name: str, column: pa.ChunkedArray, kind: ImageKind, store: ImageStore) -> Any:
    """References to the images of a column, strings [rows].

    Raises:
        ValueError: its values are of another kind.
    """
    import pyarrow as pa

    from vllm_relay.tables.jobs.arrow_texts import is_bytes, is_text

    has_bytes = kind == "bytes"
    fits = is_bytes(column.type) if has_bytes else is_text(column.type)
    if not fits and not pa.types.is_null(column.type):
        raise ValueError(
            f"column {name!r} of type {column.type} given as images of kind {kind!r}, expected "
            f"{'bytes' if has_bytes else 'texts'}"
        )
    values = column.cast(pa.large_binary() if has_bytes else pa.large_string())
    return pa.chunked_array([references(each, kind, store) for each in values.chunks], pa.string())


def references(values: pa.Array, kind: ImageKind, store: ImageStore) -> pa.Array:
    """References to the images that values stand for, strings [rows]."""
    import pyarrow as pa

    found = values.to_pylist()
    return pa.array(
        [None if value is None else store.reference(kind, value) for value in found], pa.string()
    )

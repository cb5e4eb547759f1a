# SPDX-License-Identifier: Apache-2.0
"""Which fields of a question are images, and what their values are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from vllm_relay.tables.images.store import ImageStore

ImageKind = Literal["bytes", "path", "url"]


@dataclass(frozen=True)
class ImageFields:
    """
    Attributes:
        kinds: what the values of a field are, by its name: the bytes of a file, its path below the
            store's folder, or an address, http://, https:// or data:.
        store: of the images.

    Raises:
        ValueError: a kind is not known, or there are paths and the store has no folder.
    """

    kinds: tuple[tuple[str, ImageKind], ...]
    store: ImageStore = field(compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, kind in self.kinds:
            if kind not in get_args(ImageKind):
                raise ValueError(
                    f"images with {name!r}: {kind!r} given, expected one of "
                    f"{list(get_args(ImageKind))}: what the field's values are"
                )
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
        ValueError: as for `ImageFields`.
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
    return ImageFields(tuple(named.items()), store)  # type: ignore[arg-type]  # checked there

# SPDX-License-Identifier: Apache-2.0
"""References to images, and what they stand for."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.tables.images.pictures import MEDIA_TYPES, data_url, picture
from vllm_relay.tables.images import (
    PROBE_URL,
    REFERENCE,
    ImageError,
    ImageStore,
    content_parts,
    image_fields,
    referred,
)


def digest(reference: str) -> str:
    found = REFERENCE.fullmatch(reference)
    assert found is not None
    return found[1]


def url(store: ImageStore, kind: str, value: Any) -> str:
    return store.url(digest(store.reference(kind, value)))


@pytest.mark.parametrize("format", list(MEDIA_TYPES))
def test_the_same_bytes_are_one_image_wherever_they_come_from(format: str, tmp_path: Path) -> None:
    content = picture(7, format)
    (tmp_path / "a").write_bytes(content)
    (tmp_path / "b").symlink_to("a")
    store = ImageStore(tmp_path)
    values = [
        ("bytes", content), ("path", "a"), ("path", "b"), ("path", str(tmp_path / "a")),
        ("path", "./x/../a"), ("url", data_url(content, format)),
        ("url", data_url(content).replace("data:", "DATA:")),
    ]  # fmt: skip
    [reference] = {store.reference(kind, value) for kind, value in values}
    assert store.url(digest(reference)) == data_url(content, format)
    assert reference != store.reference("bytes", picture(8, format))


def test_addresses_are_left_to_the_server() -> None:
    store = ImageStore()
    address = "https://example.org/a.png?b=1"
    assert url(store, "url", address) == address
    assert store.reference("url", address) != store.reference("url", address + "2")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of images beside files that are nobody's business."""
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "a.png").write_bytes(picture(1))
    (folder / "text").write_text("no image")
    (tmp_path / "secret.png").write_bytes(picture(2))
    (tmp_path / "images2").mkdir()
    (tmp_path / "images2" / "b.png").write_bytes(picture(3))
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "loop").symlink_to("loop")
    (folder / "up").symlink_to("..")
    os.mkfifo(folder / "pipe")
    return folder


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("../secret.png", "leads out of image_folder"),
        ("{folder}/../secret.png", "leads out of"),
        ("../images2/b.png", "leads out of"),
        ("link.png", "leads out of"),
        ("up/secret.png", "leads out of"),
        ("/etc/passwd", "leads out of"),
        ("~/secret.png", "is no file below"),
        ("file://{folder}/a.png", "is no file below"),
        ("nothing.png", "is no file below"),
        ("", "is no file below"),
        (".", "is no file below"),
        ("pipe", "is no file below"),
        ("loop", "path 'loop'"),
        ("a\0.png", "cannot be read"),
        ("x" * 9000, "path 'x"),
        ("text", "file 'text' of 8 bytes is no image: expected PNG, JPEG"),
    ],
)
def test_paths_lead_to_images_below_the_folder_only(folder: Path, path: str, message: str) -> None:
    store = ImageStore(folder)
    with pytest.raises(ImageError, match=message):
        url(store, "path", path.format(folder=folder))


@given(st.lists(st.sampled_from(["..", "images", "images2", "up", "a.png", "b.png", "link.png",
                                 "secret.png", ".", "/", "loop"]), max_size=6))  # fmt: skip
def test_no_path_leads_out(tmp_path_factory: pytest.TempPathFactory, parts: list[str]) -> None:
    root = tmp_path_factory.getbasetemp() / "walk"
    folder = root / "images"
    if not root.exists():
        for name in ("images/images2", "images2"):
            (root / name).mkdir(parents=True)
        (folder / "a.png").write_bytes(picture(1))
        (folder / "images2" / "b.png").write_bytes(picture(1))
        for name in ("secret.png", "images2/b.png"):
            (root / name).write_bytes(picture(2))
        (folder / "link.png").symlink_to(root / "secret.png")
        (folder / "up").symlink_to("..")
        (folder / "loop").symlink_to("loop")
    store = ImageStore(folder)
    try:
        found = url(store, "path", "/".join(parts))
    except ImageError:
        return
    assert found == data_url(picture(1))


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("bytes", b"", "of 0 bytes is no image"),
        ("bytes", b"BMW is no bitmap", "is no image"),
        ("bytes", b"<svg></svg>", "is no image"),
        ("url", "file:///etc/passwd", "expected http://, https:// or data:image"),
        ("url", "/etc/passwd", "expected http://"),
        ("url", "data:text/plain;base64,YQ==", "expected http://"),
        ("url", "data:image/png;base64,a b", "holds no base64"),
        ("url", data_url(b"text"), "is no image"),
    ],
)
def test_what_is_no_image_is_an_error(kind: str, value: Any, message: str) -> None:
    with pytest.raises(ImageError, match=message):
        url(ImageStore(), kind, value)


def test_a_file_that_changes_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(picture(1))
    store = ImageStore(tmp_path)
    found = digest(store.reference("path", "a.png"))
    file.write_bytes(picture(2))
    with pytest.raises(ImageError, match="has changed"):
        store.url(found)
    file.unlink()
    with pytest.raises(ImageError, match="cannot be read any more"):
        store.url(found)


def test_nothing_is_kept_after_the_end() -> None:
    store = ImageStore()
    found = digest(store.reference("bytes", picture(1)))
    [kept] = {Path(each.file).parent for each in store._images.values() if each.file}
    assert kept.is_dir()
    store.close()
    assert not kept.exists()
    with pytest.raises(ImageError, match="no field"):
        store.url(found)


def test_a_message_is_texts_and_images_in_turn() -> None:
    store = ImageStore()
    one, two = (store.reference("bytes", picture(shade)) for shade in (1, 2))
    message = f'Compare.\n\n"a": "{one}"\n"text": "b"\n"c": "{two}"\n{one}'
    assert content_parts(message, store) == [
        {"type": "text", "text": 'Compare.\n\n"a": '},
        {"type": "image_url", "image_url": {"url": data_url(picture(1))}},
        {"type": "text", "text": '\n"text": "b"\n"c": '},
        {"type": "image_url", "image_url": {"url": data_url(picture(2))}},
        {"type": "image_url", "image_url": {"url": data_url(picture(1))}},
    ]
    with pytest.raises(ImageError, match="no field"):
        content_parts(f"relay-image:{'0' * 64}", store)


def test_the_probe_is_an_image(tmp_path: Path) -> None:
    file = tmp_path / "probe"
    file.write_bytes(base64.b64decode(PROBE_URL.partition(",")[2], validate=True))
    with Image.open(file) as image:
        assert image.size == (64, 64) and image.convert("RGB").getextrema() == ((255, 255),) * 3


def test_columns_of_values_become_references() -> None:
    store = ImageStore()
    content = picture(1)
    reference = store.reference("bytes", content)
    types = [pa.binary(), pa.large_binary(), pa.binary(len(content)), pa.binary_view()]
    for type in types:
        column = pa.chunked_array([pa.array([content, None], type), pa.array([], type)])
        assert referred("a", column, "bytes", store).to_pylist() == [reference, None]
    for type in (pa.string(), pa.large_string(), pa.string_view()):
        column = pa.chunked_array([pa.array([data_url(content)], type)])
        assert referred("a", column, "url", store).to_pylist() == [reference]
    assert referred("a", pa.chunked_array([pa.nulls(2)]), "url", store).to_pylist() == [None] * 2
    with pytest.raises(ValueError, match="column 'a' of type string given .* expected bytes"):
        referred("a", pa.chunked_array([["x"]]), "bytes", store)
    with pytest.raises(ValueError, match="column 'a' of type int64 given .* expected texts"):
        referred("a", pa.chunked_array([[1]]), "path", store)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"a": "file"}, "'a': 'file' given, expected one of"),
        ({"a": "path"}, "without a folder.* give image_folder"),
        ("a", "expected a list of fields: give"),
    ],
)
def test_bad_fields_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        image_fields(given, ImageStore())


def test_a_folder_is_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="which is no folder"):
        ImageStore(tmp_path / "nothing")

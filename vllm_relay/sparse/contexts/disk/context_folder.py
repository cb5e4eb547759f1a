# SPDX-License-Identifier: Apache-2.0
"""The files of the contexts in a folder: one each, or one for each tensor parallel rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vllm_relay.sparse.contexts.disk.context_file import (
    CONTEXT_SUFFIX,
    LINK_SUFFIX,
    QUERIES_SUFFIX,
    ContextFile,
)
from vllm_relay.sparse.files.section_table import MAGIC

_RANK_FOLDER = re.compile(r"rank-(\d+)-of-(\d+)")


@dataclass(frozen=True)
class FoundContext:
    """A context.

    Attributes:
        path: of its file; of several, as if it were one beside the folders of the ranks.
        files: those there are.
        missing: of ranks that do not have it: engines leave the context out.
    """

    path: Path
    files: tuple[Path, ...]
    missing: tuple[Path, ...] = ()

    @property
    def problem(self) -> str | None:
        """What is wrong with it, if files are missing."""
        if not self.missing:
            return None
        num_ranks = len(self.files) + len(self.missing)
        return (
            f"{self.path}: {len(self.files)} of {num_ranks} ranks have it, engines leave it out; "
            f"missing: {', '.join(path.parent.name for path in self.missing)}"
        )


def make_private_folder(folder: Path) -> None:
    """Contexts tell what prompts said: a folder that is made is for its owner only. One that is
    there stays as it is. Raises OSError: it cannot be made."""
    if not folder.parent.exists():
        make_private_folder(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)


def rank_folder(folder: Path, rank: int, num_ranks: int) -> Path:
    """Where a worker keeps its part of the contexts."""
    return folder if num_ranks == 1 else folder / f"rank-{rank}-of-{num_ranks}"


def find_contexts(path: Path) -> list[FoundContext]:
    """The contexts of a folder and of the folders of ranks in it, by name; or the one at `path`.

    Raises:
        FileNotFoundError: there is nothing.
        OSError: a file that is no context, or cannot be read.
    """
    if path.is_dir():
        own = (FoundContext(each, (each,)) for each in _files(path))
        return [*sorted(own, key=lambda each: each.path), *_of_ranks(path)]
    if not path.exists():
        found = [each for each in _of_ranks(path.parent) if each.path == path]
        if not found:
            raise FileNotFoundError(
                f"{path} does not exist, expected a context or a folder of *{CONTEXT_SUFFIX}"
            )
        return found
    if path.suffix != CONTEXT_SUFFIX:
        if not path.is_file():
            raise OSError(f"{path} is no regular file")
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise OSError(f"{path} is no context: it does not begin with {MAGIC!r}")
    return [FoundContext(path, (path,))]


def parent_id_of(path: Path) -> str | None:
    """Of the context that a file continues; None also of a file that cannot be opened."""
    with suppress(OSError, ValueError), ContextFile.open(path) as file:
        return None if file.parent is None else file.parent.context_id
    return None


def parent_path(folder: Path, context_id: str) -> Path:
    """Where a context is that others continue, deleted or not."""
    link = folder / f"{context_id}{LINK_SUFFIX}"
    context = link.with_suffix(CONTEXT_SUFFIX)
    return context if context.exists() or not link.exists() else link


def delete_context(
    path: Path, held: Collection[str] = (), parent_id: Callable[[Path], str | None] = parent_id_of
) -> Path | None:
    """Deletes a context and its training queries. If others in the folder continue it, its file
    stays as a link, until `delete_unused_links`.

    Args:
        held: ids of contexts that are about to be continued.
        parent_id: of a file.

    Returns:
        the link, if there is one now.

    Raises:
        OSError: a file cannot be deleted or renamed.
    """
    path.with_suffix(QUERIES_SUFFIX).unlink(missing_ok=True)
    files = [*_files(path.parent), *path.parent.glob(f"*{LINK_SUFFIX}")]
    others = [each for each in files if each != path]
    if path.stem in held or path.stem in map(parent_id, others):
        link = path.with_suffix(LINK_SUFFIX)
        path.replace(link)
        return link
    path.unlink(missing_ok=True)
    return None


def delete_unused_links(
    folder: Path, held: Collection[str] = (), parent_id: Callable[[Path], str | None] = parent_id_of
) -> list[Path]:
    """Deletes the links that no context needs, and returns them. Args: as `delete_context`. Raises
    OSError: a file cannot be deleted."""
    links = {each.stem: each for each in folder.glob(f"*{LINK_SUFFIX}")}
    if not links:
        return []
    waiting: list[str | None] = [*held, *map(parent_id, _files(folder))]
    while waiting:
        link = links.pop(waiting.pop() or "", None)
        if link is not None:
            waiting.append(parent_id(link))
    for link in links.values():
        link.unlink(missing_ok=True)
    return list(links.values())


def _of_ranks(folder: Path) -> list[FoundContext]:
    found = []
    for num_ranks in sorted(_rank_counts(folder)):
        folders = [rank_folder(folder, rank, num_ranks) for rank in range(num_ranks)]
        for name in sorted({file.name for each in folders for file in _files(each)}):
            files = [each / name for each in folders]
            there = tuple(file for file in files if file.is_file())
            missing = tuple(file for file in files if file not in there)
            found.append(FoundContext(folder / name, there, missing))
    return found


def _rank_counts(folder: Path) -> set[int]:
    """How many ranks have folders here; a folder may be of several engines."""
    matches = (_RANK_FOLDER.fullmatch(each.name) for each in folder.glob("rank-*") if each.is_dir())
    return {int(match[2]) for match in matches if match and int(match[1]) < int(match[2])}


def _files(folder: Path) -> list[Path]:
    return [each for each in folder.glob(f"*{CONTEXT_SUFFIX}") if each.is_file()]
